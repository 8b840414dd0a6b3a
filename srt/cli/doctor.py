"""`tandem doctor`: is this machine and installation fit, and what would make it better."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from srt.cli.options import cache_folder
from srt.config.facts import MachineFacts
from srt.config.probe import probe_machine
from srt.config.rules_device import INSTALL, why_machine_has_no_gpu
from srt.launch.kernel_caches import FOLDER, look_for_kernels, ready_folder


@dataclass(frozen=True, slots=True)
class Finding:
    """`level`: ok, note (works, could be better) or bad (will not work)."""

    level: str
    subject: str
    text: str


OURS = ("srt", "kernels", "tokenizer_proc", "bench")  # two of these names exist on PyPI too
NEEDED = (
    "zmq",
    "uvloop",
    "orjson",
    "msgspec",
    "fastapi",
    "uvicorn",
    "tokenizers",
    "jinja2",
    "llguidance",
    "torch",
)
GPU_PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        "triton": "without it no model runs on a GPU",
        "flashinfer-python": "with it prompts are computed faster on sm_90",
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    cache = Path(cache_folder())
    machine = look_for_kernels(probe_machine(), str(cache))
    findings = [
        *check_packages(),
        *check_machine(machine),
        *check_gpus(machine),
        *check_cache(cache),
        *check_kernel_caches(cache, machine),
    ]
    for finding in findings:
        print(f"{finding.level:<5}{finding.subject:<16}{finding.text}")
    return 1 if any(finding.level == "bad" for finding in findings) else 0


def check_packages() -> list[Finding]:
    root = Path(__file__).parents[2]
    found = []
    for name in OURS:
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec else []
        if places and Path(places[0]).parent == root:
            found.append(Finding("ok", name, "is ours"))
        else:
            where = places[0] if places else "nowhere"
            found.append(
                Finding(
                    "bad", name, f"comes from {where}: another package shadows ours; uninstall it"
                )
            )
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            found.append(Finding("bad", name, "is not installed: pip install -e ."))
    try:
        found.append(Finding("ok", "torch", importlib.metadata.version("torch")))
    except importlib.metadata.PackageNotFoundError:
        pass
    return found


def check_machine(machine: MachineFacts) -> list[Finding]:
    memory = machine.memory_available / 1e9
    flags = [
        flag
        for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
        if flag in machine.cpu_flags
    ]
    found = [
        Finding(
            "ok",
            "cores",
            f"{machine.num_cores}; {' '.join(flags) or 'no vector extension known to us'}",
        ),
        Finding(
            "ok" if memory > 1.5 else "bad",
            "memory",
            f"{memory:.1f} GB available; the default model wants 1.2 GB in all",
        ),
    ]
    if machine.compiler:
        found.append(Finding("ok", "compiler", f"{machine.compiler}: native kernels can be built"))
    else:
        found.append(
            Finding(
                "note", "compiler", "none: torch's kernels are used; install gcc for faster ones"
            )
        )
    return found


def check_gpus(machine: MachineFacts) -> list[Finding]:
    """Each GPU, what its kernels are made with, and whether the engine would use it."""
    found = [
        Finding(
            "ok",
            f"gpu-{gpu.index}",
            f"{gpu.name}, sm_{gpu.capability}, {gpu.memory_total / 1e9:.1f} GB "
            f"({gpu.memory_free / 1e9:.1f} free), driver {gpu.driver}",
        )
        for gpu in machine.gpus
    ]
    lack = why_machine_has_no_gpu(machine)
    if not machine.gpus:
        return [Finding("note", "gpu", f"none: {lack}; models run on the CPU")]
    found.append(
        Finding("ok", "gpu-use", f"models run on gpu 0, with CUDA {machine.torch_cuda}")
        if lack is None
        else Finding("note", "gpu-use", f"models run on the CPU: {lack}")
    )
    for name, why in GPU_PACKAGES.items():
        version = machine.versions.get(name)
        found.append(
            Finding("ok", name, version)
            if version
            else Finding("note", name, f"not installed: {why} ({INSTALL})")
        )
    if "flashinfer-python" in machine.versions and machine.flashinfer_trouble:
        found.append(Finding("note", "flashinfer", machine.flashinfer_trouble))
    return found


def check_kernel_caches(folder: Path, machine: MachineFacts) -> list[Finding]:
    """What a start on the GPU would find compiled."""
    if not machine.gpus:
        return []
    kernels = len(list((folder / FOLDER / "triton").glob("*/*.cubin")))
    ready = ready_folder(str(folder), machine)
    operators = 0 if ready is None else len(list(ready.rglob("*.so")))
    level = "ok" if kernels else "note"
    text = f"{kernels} Triton kernels, {operators} FlashInfer operators in {folder / FOLDER}"
    if not kernels:
        text += "; `tandem warm` compiles them before a start has to"
    return [Finding(level, "kernel-cache", text)]


def check_cache(folder: Path) -> list[Finding]:
    models = folder / "models"
    names = sorted(path.name for path in models.iterdir()) if models.is_dir() else []
    return [Finding("ok", "cache", f"{folder}; models: {', '.join(names) or 'none yet'}")]
