"""A child's end of the two pipes: reports up stdout, notices down stdin."""

from __future__ import annotations

import faulthandler
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import orjson

GRACE_SECONDS = 5.0  # between the parent's death and our own


class Control:
    """Takes stdout away from everybody else: a stray print would look like a report, so it goes to
    stderr instead."""

    def __init__(self) -> None:
        self._reports = os.dup(1)
        os.dup2(2, 1)
        self._notices = _read_lines(0)
        self.is_orphaned = False  # the parent is gone or closed the pipe

    def read_boot(self) -> bytes:
        """Empty if the parent died before it said anything."""
        return next(self._notices, b"")

    def report(self, **fields: Any) -> None:
        try:
            os.write(self._reports, orjson.dumps(fields) + b"\n")
        except BrokenPipeError:
            pass  # the parent is gone; `listen` notices that too

    def report_ready(self, **fields: Any) -> None:
        """What is there now stays, so the garbage collector need not walk over it again: that would
        stop a process that has imported torch for some 70 ms every few thousand requests."""
        gc.collect()
        gc.freeze()
        self.report(ready=fields)

    def show_phase(self, phase: str, fraction: float | None = None) -> None:
        self.report(phase=phase, fraction=fraction)

    def listen(
        self, on_notice: Callable[[dict[str, Any]], None], on_end: Callable[[], None]
    ) -> None:
        """Calls back from a thread. After `on_end` (the parent is gone or closed the pipe) the process
        has `GRACE_SECONDS` to leave by itself; what its threads do then goes to stderr, and it ends with
        code 1, which nobody is left to read."""

        def run() -> None:
            for line in self._notices:
                on_notice(orjson.loads(line))
            self.is_orphaned = True
            on_end()
            faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True)

        threading.Thread(target=run, daemon=True, name="control").start()


def _read_lines(descriptor: int) -> Iterator[bytes]:
    """Lines up to the end of the stream. Reads the descriptor itself: a thread that sits in a buffered
    reader holds its lock, and the interpreter cannot end then."""
    rest = b""
    while data := os.read(descriptor, 65536):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
