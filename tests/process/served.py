"""`tandem serve` as a user runs it, for tests that kill its processes and look at what is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


class Served:
    """`tandem serve` as a user runs it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "srt.cli.main", "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.lines: list[str] = []

    def wait_ready(self) -> str:
        """The address it printed."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("listening on "):
                return line.split()[2].rstrip(";")
        raise AssertionError("".join(self.lines))

    def children(self) -> dict[str, psutil.Process]:
        found = {}
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            if "srt.launch.roles" in words:
                found[words[-1]] = child
        return found

    def end(self) -> tuple[int, str]:
        """Exit code and everything it wrote."""
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, "".join(self.lines) + errors

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exit: object) -> None:
        """Whatever the test thought of it, nothing outlives it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=30)

    def leftovers(self) -> list[str]:
        return [str(path) for path in self.folder.glob("tandem-*")]


def slow_script(script: Callable[..., str]) -> str:
    return script(["a", "b"], script=[256, 257] * 100, step_seconds=0.02)
