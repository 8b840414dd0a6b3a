"""One child process and the two pipes that tie it to its parent.

Down its stdin the parent writes JSON lines: first the boot record, later notices such as
`{"dead": "scheduler"}`. The end of that stream means that the parent is gone, so no child outlives it.
Up its stdout the child writes JSON lines: `{"phase": ..., "fraction": ...}` while it starts,
`{"ready": {...}}` once, `{"error": ...}` for a refusal that a user should read. Logs go to stderr.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(slots=True, kw_only=True)
class Event:
    """Something a child said (`report`) or that it ended (`exit_code`)."""

    role: str
    report: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


class Child:
    """A running child. Its events arrive on the queue that is shared by all children."""

    def __init__(
        self,
        role: str,
        boot: bytes,
        events: queue.SimpleQueue[Event],
        environment: Mapping[str, str],
    ) -> None:
        self.role = role
        self._events = events
        self._process = subprocess.Popen(
            [sys.executable, "-m", "srt.launch.roles", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,  # a Ctrl-C in the terminal reaches the supervisor only
        )
        self._listener = threading.Thread(target=self._listen, daemon=True, name=f"listen-{role}")
        self._listener.start()
        self.tell(boot)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def tell(self, line: bytes) -> None:
        """Writes one line to the child; a child that is gone reports that by its exit."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass

    def ask_to_stop(self) -> None:
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)

    def end(self, grace: float) -> int:
        """Closes the lifeline, waits `grace` seconds, then kills. Returns the exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            code = self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._listener.join(1.0)
        self._process.stdout.close()
        return code

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                report = orjson.loads(line)
            except orjson.JSONDecodeError:
                report = {"stray": line.decode(errors="replace").rstrip()}
            self._events.put(Event(role=self.role, report=report))
        self._events.put(Event(role=self.role, exit_code=self._process.wait()))
