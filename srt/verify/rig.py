"""One set of weights, and as many engines over it as there are variants, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from srt.protocols.worker import Worker

ShowPhase = Callable[[str, float | None], None]


class Rig(Protocol):
    @property
    def kernels(self) -> str:
        """What computes, in words."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether what is computed for a token is the same, bit for bit, in any company."""
        ...

    def worker(
        self, *, num_tokens: int, page_size: int, max_rows: int, algorithm: str | None
    ) -> Worker:
        """A worker with an empty KV pool of `num_tokens`; the one before it is not to be used again.
        `algorithm`: who guesses, a name of --speculative-algorithm."""
        ...

    def close(self) -> None: ...


class ScriptRig:
    """A scripted model: the engine without a model in it."""

    kernels = "none: the model is a script"
    is_exact = True

    def __init__(self, path: Path) -> None:
        from srt.runner.script import load_script

        self._script = load_script(path)

    def worker(
        self, *, num_tokens: int, page_size: int, max_rows: int, algorithm: str | None
    ) -> Worker:
        from srt.runner.script import ScriptedWorker

        return ScriptedWorker(
            self._script,
            num_pages=1 + num_tokens // page_size,
            page_size=page_size,
            max_rows=max_rows,
            step_seconds=0.0,
        )

    def close(self) -> None:
        """A script holds nothing."""
