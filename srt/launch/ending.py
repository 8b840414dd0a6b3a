"""SIGTERM as a reason to leave through the door: whoever began something ends it on the way out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM  # what a shell makes of a process that it ended


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Within it the first SIGTERM raises SystemExit in the main thread; more of them change nothing.
    For commands that start an engine for themselves; `tandem serve` drains instead."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(EXIT_CODE)

    if threading.current_thread() is not threading.main_thread():  # only there can one listen
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
