"""Build and load the C kernels: once per source, compiler and CPU, into a cache folder."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels.arena import Arena
from kernels.pool import Pool

# Not -ffast-math: linked into a shared object it switches denormals off for the whole process.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fopenmp-simd",  # the pragmas only: the threads are ours, see pool.c
    "-pthread",
)
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The loaded kernels. Keep it as long as anything bound to it is in use."""

    path: Path
    functions: ctypes.CDLL
    pool: Pool  # the threads all its functions share; close it when nothing runs any more
    arena: Arena = field(default_factory=Arena)  # where packed weights live

    def function(
        self, name: str, *arguments: type[ctypes._SimpleCData[Any]]
    ) -> Callable[..., None]:
        """A C function that returns nothing. Its own object: another binding may differ."""
        bound = self.functions[name]
        bound.argtypes, bound.restype = arguments, None
        return bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Why there are no native kernels on this machine."""

    reason: str


def build(
    cache_dir: Path, compiler: str | None, threads: int | None = None
) -> Library | Unavailable:
    """Compile `kernels/**/*.c`, or take them from the cache, load them and start their threads.

    `compiler` is a path or a name on PATH; None: only a cached build made by any compiler is used.
    `threads` counts the calling one; None: as many as torch has here.
    Several processes may call this at once: one compiles, the others wait and load its result.
    """
    folder = Path(__file__).parent
    sources = sorted(folder.glob("**/*.c"))
    cpu = _cpu()
    digest = hashlib.sha256(repr((FLAGS, cpu)).encode())
    for source in (*sources, *sorted(folder.glob("*.h"))):
        digest.update(source.read_bytes())
    stem = f"kernels-{digest.hexdigest()[:16]}"
    if compiler is None:
        cached = sorted(cache_dir.glob(f"{stem}-*.so"))
        return (
            _load(cached[0], threads)
            if cached
            else Unavailable(reason="no C compiler, no cached build")
        )
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT_SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Unavailable(reason=f"C compiler {compiler} does not run: {error}")
    target = cache_dir / f"{stem}-{hashlib.sha256(version).hexdigest()[:8]}.so"
    if target.exists():
        return _load(target, threads)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with open(cache_dir / f"{stem}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, folder, sources, target)
    except OSError as error:
        return Unavailable(reason=f"cannot write {cache_dir}: {error}")
    except subprocess.TimeoutExpired:
        return Unavailable(reason=f"{compiler} took longer than {TIMEOUT_SECONDS:.0f} s")
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        return Unavailable(reason=f"{compiler} failed: {lines[0]}")
    return _load(target, threads)


def _compile(compiler: str, folder: Path, sources: list[Path], target: Path) -> None:
    """Into a temporary file first: the target name appears complete or not at all."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        command = [compiler, *FLAGS, f"-I{folder}", "-o", name, *map(str, sources), "-lm"]
        subprocess.run(command, capture_output=True, check=True, timeout=TIMEOUT_SECONDS)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _load(path: Path, threads: int | None) -> Library | Unavailable:
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        return Unavailable(reason=f"cannot load {path}: {error}")
    pool = Pool(functions, torch.get_num_threads() if threads is None else threads)
    return Library(path=path, functions=functions, pool=pool)


def _cpu() -> str:
    """What -march=native looks at: the machine's name and its CPU flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [x for x in lines if x.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.machine(), *sorted(set(named))])
