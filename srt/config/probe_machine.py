"""What the machine is, read without importing anything heavy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

from srt.config.facts import MachineFacts
from srt.config.probe_gpu import probe_visible, torch_cuda

PACKAGES = (
    "tandem-serve",
    "torch",
    "triton",
    "flashinfer-python",
    "tokenizers",
    "safetensors",
    "gguf",
    "pyzmq",
    "msgspec",
)
COMPILERS = ("cc", "gcc", "clang")
_CGROUP_LIMITS = (  # (limit, use) of the container: version 2, version 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def probe_machine(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> MachineFacts:
    """Cores and memory are what this process may use, inside a container too."""
    total, available = _memory(proc, cgroup)
    gpus, trouble = probe_visible()
    return MachineFacts(
        num_cores=_num_cores(cgroup),
        memory_total=total,
        memory_available=available,
        cpu_flags=_cpu_flags(proc),
        has_cuda=bool(gpus),
        compiler=next((path for name in COMPILERS if (path := shutil.which(name))), None),
        versions={"python": platform.python_version()} | _versions(),
        gpus=gpus,
        gpu_trouble=trouble,
        torch_cuda=torch_cuda(),
    )


def _num_cores(cgroup: Path) -> int:
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    words = (_read(cgroup / "cpu.max") or "max").split()
    if words[0] != "max" and len(words) == 2:
        cores = min(cores, max(1, int(words[0]) // int(words[1])))
    return cores


def _memory(proc: Path, cgroup: Path) -> tuple[int, int]:
    """(total, available) in bytes."""
    lines = (_read(proc / "meminfo") or "").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if " kB" in line}
    if "MemTotal" not in sizes:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2  # no /proc: half is a guess on the safe side
    total = sizes["MemTotal"]
    available = sizes.get("MemAvailable", sizes.get("MemFree", total // 2))
    for limit_name, use_name in _CGROUP_LIMITS:
        limit, use = _read(cgroup / limit_name), _read(cgroup / use_name)
        if limit and limit != "max" and use and int(limit) < total:
            total = int(limit)
            available = min(available, max(0, total - int(use)))
    return total, available


def _cpu_flags(proc: Path) -> list[str]:
    for line in (_read(proc / "cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return value.split()
    return []


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
