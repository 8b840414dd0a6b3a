"""Compiling for an sm_90 GPU, or an older one, without any: the assembler comes with Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


SMALLEST_ROOM = 99 << 10  # bytes of shared memory that a program has on sm_86, sm_89 and sm_120


def pretend_hopper(capability: int = 90) -> None:
    """Triton's own compiler then takes every kernel for one; nothing can be launched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Hopper:
        """As much of a driver as compiling asks for."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    driver.set_active(Hopper())


def run_compiling(file: str, cache: Path) -> list[str]:
    """The words that the file, run as a program where nothing is interpreted, prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, file], env=environment, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.split()
