"""Where a process that computes on a GPU keeps what it compiles, in our cache folder.

    CACHE/gpu/triton/                      Triton's, keyed by source, version and target
    CACHE/gpu/flashinfer/                  what FlashInfer compiles here: sources, objects, libraries
    CACHE/gpu/ready-VERSION-smNN/          its libraries alone, as the package `flashinfer_jit_cache`
                                           that FlashInfer loads instead of compiling

FlashInfer's own folder cannot be shipped: its build files name absolute paths and run at every start.
The package can, so `tandem warm` collects the libraries into one (`srt.launch.kernel_pack`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from srt.config.facts import MachineFacts

FOLDER = "gpu"
PACKAGE = "flashinfer_jit_cache"
EXPANDED_OPERATOR = "batch_prefill_with_kv_cache_*_head_dim_qk_192_head_dim_vo_128_*"
ABSORBED_OPERATOR = "batch_mla_attention_*_head_dim_ckv_512_head_dim_kpe_64_profiler_False*"
ShowPhase = Callable[[str, float | None], None]


def kernel_caches(cache_folder: str) -> dict[str, str]:
    """Environment variables that put both caches into ours."""
    root = Path(cache_folder).absolute() / FOLDER
    return {
        "TRITON_CACHE_DIR": str(root / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(root / "flashinfer"),
    }


def ready_folder(cache_folder: str, machine: MachineFacts) -> Path | None:
    """Where FlashInfer's finished libraries are for this version and this GPU; None without either."""
    version = machine.versions.get("flashinfer-python")
    if version is None or not machine.gpus:
        return None
    name = f"ready-{version}-sm{machine.gpus[0].capability}"
    return Path(cache_folder).absolute() / FOLDER / name


def look_for_kernels(machine: MachineFacts, cache_folder: str) -> MachineFacts:
    """The facts, and whether Triton and FlashInfer have what they need on this machine: something to
    compile with, or everything compiled already. Imports neither."""
    if not machine.gpus:
        return machine
    ready = ready_folder(cache_folder, machine)
    has_operators = (ready is not None and ready.is_dir()) or find_spec(PACKAGE) is not None
    can_compile = _has_nvcc()

    def trouble_of(operator: str, form: str) -> str:
        if can_compile or _has_operator(ready, operator):
            return ""
        return (
            f"flashinfer finds no compiled operator for MLA {form} here and no nvcc to compile it "
            "with; bring it (`tandem warm --unpack`)"
        )

    return replace(
        machine,
        triton_trouble=""
        if machine.compiler or _has_launchers(cache_folder)
        else "triton needs a C compiler, and there is none on the PATH; install gcc, or bring compiled "
        "kernels (`tandem warm --unpack`)",
        flashinfer_trouble=""
        if has_operators or can_compile
        else "flashinfer finds no compiled operators here and no nvcc to compile them with; install "
        "flashinfer-jit-cache or the CUDA toolkit, or bring them (`tandem warm --unpack`)",
        flashinfer_latent_trouble=trouble_of(EXPANDED_OPERATOR, "expanded"),
        flashinfer_absorbed_trouble=trouble_of(ABSORBED_OPERATOR, "absorbed"),
    )


def _has_operator(ready: Path | None, operator: str) -> bool:
    folders = [] if ready is None else [ready / PACKAGE]
    spec = find_spec(PACKAGE)
    if spec is not None:
        folders += map(Path, spec.submodule_search_locations or ())
    return any(any((each / "jit_cache").glob(f"{operator}/*.so")) for each in folders)


def _has_launchers(cache_folder: str) -> bool:
    """Triton's own C modules, which every kernel is launched through."""
    default = kernel_caches(cache_folder)["TRITON_CACHE_DIR"]
    return any(Path(os.environ.get("TRITON_CACHE_DIR", default)).glob("*/cuda_utils*.so"))


def _has_nvcc() -> bool:
    """Where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").is_file()


def use_kernel_caches(cache_folder: str, machine: MachineFacts) -> None:
    """For this process, before it imports Triton or FlashInfer or makes a CUDA context. What the user
    set in the environment, and a `flashinfer_jit_cache` that is installed, go first."""
    for name, value in kernel_caches(cache_folder).items():
        Path(os.environ.setdefault(name, value)).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which they were probed
    ready = ready_folder(cache_folder, machine)
    if ready is not None and ready.is_dir() and str(ready) not in sys.path:
        sys.path.append(str(ready))


def announce_compiles(show: ShowPhase) -> None:
    """From now on every Triton kernel that had to be compiled is shown, with how long it took."""
    from triton import knobs

    def tell(*, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            show(f"compile: {src.name}, {times.total / 1e6:.1f} s", None)

    knobs.compilation.listener = tell
