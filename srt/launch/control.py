"""A child's end of the two pipes: reports up stdout, notices down stdin."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

import orjson

GRACE_SECONDS = 5.0  # between the parent's death and our own


class Control:
    """Takes stdout away from everybody else: a stray print would look like a report, so it goes to
    stderr instead."""

    def __init__(self) -> None:
        self._reports: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._notices: BinaryIO = sys.stdin.buffer

    def read_boot(self) -> bytes:
        return self._notices.readline()

    def report(self, **fields: Any) -> None:
        try:
            self._reports.write(orjson.dumps(fields) + b"\n")
        except BrokenPipeError:
            pass  # the parent is gone; `listen` notices that too

    def show_phase(self, phase: str, fraction: float | None = None) -> None:
        self.report(phase=phase, fraction=fraction)

    def listen(
        self, on_notice: Callable[[dict[str, Any]], None], on_end: Callable[[], None]
    ) -> None:
        """Calls back from a thread. After `on_end` (the parent is gone or closed the pipe) the process
        has `GRACE_SECONDS` to leave by itself."""

        def run() -> None:
            for line in self._notices:
                on_notice(orjson.loads(line))
            on_end()
            timer = threading.Timer(GRACE_SECONDS, os._exit, (70,))
            timer.daemon = True
            timer.start()

        threading.Thread(target=run, daemon=True, name="control").start()
