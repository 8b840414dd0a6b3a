"""The C kernels are compiled once for the session, into a temporary folder.

Those in Triton run on the GPU where there is one, else on the CPU in Triton's interpreter.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch

from kernels.native_build import Library, Unavailable, build

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which is later


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> Library | Unavailable:
    return build(tmp_path_factory.mktemp("kernels"), shutil.which("cc"))


@pytest.fixture
def library_for(native_library: Library | Unavailable) -> Callable[[str], Library | None]:
    """The library an implementation needs; skips where this machine has none."""

    def get(implementation: str) -> Library | None:
        if implementation == "triton" and find_spec("triton") is None:
            pytest.skip("triton is not installed")
        if implementation != "native":
            return None
        if isinstance(native_library, Unavailable):
            pytest.skip(f"no native kernels: {native_library.reason}")
        return native_library

    return get


@pytest.fixture
def device_for() -> Callable[[str], str]:
    """Where an implementation runs: "cuda" for triton where there is one, else "cpu"."""

    def get(implementation: str) -> str:
        return "cuda" if implementation == "triton" and torch.cuda.is_available() else "cpu"

    return get


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors are full of NaN, so an output that nobody wrote shows."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
