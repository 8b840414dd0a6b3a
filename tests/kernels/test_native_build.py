from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import ops
from kernels.arena import CHUNK_BYTES, Arena
from kernels.native_build import FLAGS, Library, Unavailable, build


def test_without_a_compiler_there_is_a_reason(tmp_path: Path):
    found = build(tmp_path, None)
    assert isinstance(found, Unavailable) and "no C compiler" in found.reason


def test_a_compiler_that_is_none(tmp_path: Path):
    found = build(tmp_path, str(tmp_path / "missing"))
    assert isinstance(found, Unavailable) and "does not run" in found.reason


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path):
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such flag" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    found = build(tmp_path / "cache", str(compiler))
    assert isinstance(found, Unavailable) and "no such flag" in found.reason
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cached_build_needs_no_compiler(native_library: Library | Unavailable):
    if isinstance(native_library, Unavailable):
        pytest.skip(f"no native kernels: {native_library.reason}")
    again = build(native_library.path.parent, None)
    assert isinstance(again, Library) and again.path == native_library.path
    assert len(list(native_library.path.parent.glob("*.so"))) == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_one_openmp_runtime(native_library: Library | Unavailable):
    if isinstance(native_library, Unavailable):
        pytest.skip(f"no native kernels: {native_library.reason}")
    lines = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line}
    assert len(runtimes) == 1  # torch's: the kernels bring none
    assert b"GOMP_" not in native_library.path.read_bytes()


def test_plain_c_paths_are_right(tmp_path: Path):
    """The same tests on a build without vector instructions: what another CPU would run."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    wrapper = tmp_path / "cc"
    words = " ".join(f'"{flag}"' for flag in FLAGS if flag != "-march=native")
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {compiler} --version\n'
        f'shift {len(FLAGS)}\nexec {compiler} {words} "$@"\n'
    )
    wrapper.chmod(0o755)
    here = Path(__file__).parent
    names = ("linear", "paged_attention", "rms_norm", "silu_mul", "rope")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-k",
            "native",
            "-p",
            "no:cacheprovider",
            *[str(here / f"test_{name}.py") for name in names],
        ],
        check=True,
        cwd=here.parent.parent,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
    )


def test_arena_pieces_are_apart_aligned_and_zero():
    arena = Arena()
    pieces = [arena.allocate(size) for size in (1, 127, 128, 129, CHUNK_BYTES, 5)]
    for piece in pieces:
        assert piece.data_ptr() % 128 == 0 and not piece.any()
        piece.fill_(1)
    assert sum(int(piece.sum()) for piece in pieces) == sum(len(piece) for piece in pieces)
    spans = sorted((p.data_ptr(), p.data_ptr() + len(p)) for p in pieces)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("implementation", ["reference", "torch", "native", "triton"])
def test_ops_are_chosen_together(implementation, library_for, device_for):
    chosen = ops.select(implementation, library_for(implementation))
    device = device_for(implementation)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    packed = chosen.pack_linear(torch.eye(64, dtype=torch.bfloat16, device=device))
    assert chosen.implementation == implementation
    assert torch.equal(packed(x), x)


def test_ops_refuse_an_unknown_word():
    with pytest.raises(ValueError, match="implementation must be one of"):
        ops.select("cuda")
