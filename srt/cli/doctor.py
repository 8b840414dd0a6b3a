"""`tandem doctor`: is this machine and installation fit, and what would make it better."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from srt.cli.options import cache_folder
from srt.config.probe import probe_machine


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    findings = [*check_packages(), *check_machine(), *check_cache(Path(cache_folder()))]
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


def check_machine() -> list[Finding]:
    machine = probe_machine()
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


def check_cache(folder: Path) -> list[Finding]:
    models = folder / "models"
    names = sorted(path.name for path in models.iterdir()) if models.is_dir() else []
    return [Finding("ok", "cache", f"{folder}; models: {', '.join(names) or 'none yet'}")]
