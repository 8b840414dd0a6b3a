"""Starts the processes in order, says what it waits for, notices a dead one, ends them all.

    starting -> ready -> draining -> ended
                   \\-> failed (a child died): open requests end with an error, then everything ends

The supervisor itself holds no request and imports neither torch nor zmq.
"""

from __future__ import annotations

import logging
import queue
import socket
import time
from collections.abc import Callable, Mapping

import orjson

from srt.errors import ConfigError, EngineDead
from srt.launch.child import Child, Event

log = logging.getLogger(__name__)

ENGINE_ROLES = ("scheduler", "detokenizer", "tokenizer")
ROLES = (*ENGINE_ROLES, "gateway")
RANK = "rank-"  # and its number: a process that computes beside the scheduler's, which is rank 0
LISTENERS = ("tokenizer", "gateway")  # those who can tell clients that another process died
STOP_SECONDS = 3.0  # for all children; less than they give themselves (control.GRACE_SECONDS)
LAST_WORDS_SECONDS = 4.0  # for the ends of requests to reach their clients
Progress = Callable[[str, str, float | None], None]  # role, phase, fraction


def rank_roles(size: int) -> tuple[str, ...]:
    """The roles that a model divided among `size` ranks needs beside the usual ones."""
    return tuple(f"{RANK}{rank}" for rank in range(1, size))


def loopback_only() -> dict[str, str]:
    """The environment that keeps the ranks' sockets on this machine: gloo and NCCL are told in no other
    way which interface to use."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return {f"{library}_SOCKET_IFNAME": names[0] for library in ("GLOO", "NCCL") if names}


def show_nothing(role: str, phase: str, fraction: float | None) -> None:
    """The progress callback of those who do not look."""


class Supervisor:
    """Owns the children. `boot` is the boot record of all of them; `roles` may leave the gateway out."""

    def __init__(
        self, *, boot: bytes, roles: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        self._boot = boot
        self._roles = roles
        self._environment = {**loopback_only(), **environment}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._children: dict[str, Child] = {}
        self.ready: dict[str, dict[str, object]] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {role: child.pid for role, child in self._children.items()}

    @property
    def is_ready(self) -> bool:
        return len(self.ready) == len(self._roles)

    def start(
        self,
        progress: Progress = show_nothing,
        timeout: float = 600.0,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Returns when every child is ready, or when `is_stopping`. Raises ConfigError with a child's
        own words if it refused its configuration, EngineDead if it died or took longer than
        `timeout` seconds."""
        deadline = time.monotonic() + timeout
        try:
            for role in self._roles:
                self._children[role] = Child(role, self._boot, self._events, self._environment)
            while not self.is_ready and not is_stopping():
                self._await_report(progress, deadline)
        except BaseException:
            self.kill()
            raise

    def _await_report(self, progress: Progress, deadline: float) -> None:
        waiting = [role for role in self._roles if role not in self.ready]
        try:
            event = self._events.get(timeout=0.2)
        except queue.Empty:
            if time.monotonic() > deadline:
                raise EngineDead(f"{', '.join(waiting)} did not get ready in time") from None
            return
        if event.exit_code is not None:
            raise EngineDead(f"{event.role} ended with code {event.exit_code} while starting")
        report = event.report
        if "error" in report:
            raise ConfigError(str(report["error"]))
        if "ready" in report:
            self.ready[event.role] = report["ready"]
            progress(event.role, "ready", 1.0)
        elif "phase" in report:
            progress(event.role, str(report["phase"]), report.get("fraction"))
        elif "stray" in report:
            log.warning("%s printed: %s", event.role, report["stray"])

    def watch(self, timeout: float | None = None) -> str | None:
        """Blocks until a child ends and returns its role, or None after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                return None
            if _is_end(event):
                log.error("%s ended with code %s", event.role, event.exit_code)
                return event.role

    def announce_death(self, role: str) -> None:
        """Lets the living processes end every open request with an error."""
        notice = orjson.dumps({"dead": role})
        for listener in LISTENERS:
            if listener in self._children:
                self._children[listener].tell(notice)

    def drain(self, seconds: float, is_forced: Callable[[], bool] = lambda: False) -> str | None:
        """Asks those who take requests to refuse new ones and finish the rest. The tokenizer ends what
        is open after `seconds`, or at once when `is_forced`; the gateway passes those ends on, so
        both get a little longer. Returns when they are gone: the role of a child that died meanwhile,
        which was announced, or None. At once while they start: nothing can be open then."""
        if not self.is_ready:
            return None
        fronts = {role: self._children[role] for role in LISTENERS if role in self._children}
        for child in fronts.values():
            child.ask_to_stop()
        deadline = time.monotonic() + seconds + LAST_WORDS_SECONDS
        is_told, dead, waiting = False, None, set(fronts)
        while waiting and time.monotonic() < deadline:
            if is_forced() and not is_told:
                is_told = True
                deadline = time.monotonic() + LAST_WORDS_SECONDS
                for child in fronts.values():
                    child.tell(orjson.dumps({"hurry": True}))
            try:
                event = self._events.get(timeout=0.02)
            except queue.Empty:
                continue
            if not _is_end(event):
                continue
            waiting.discard(event.role)
            is_done = event.role in fronts and event.exit_code == 0
            if not is_done and dead is None:
                dead = event.role
                log.error("%s ended with code %s while draining", dead, event.exit_code)
                self.announce_death(dead)
                deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
        return dead

    def stop(self, grace: float = STOP_SECONDS) -> dict[str, int]:
        """Ends every child, within `grace` seconds all of them together, and returns the exit codes.
        Idempotent."""
        for child in self._children.values():
            child.ask_to_stop()
        deadline = time.monotonic() + grace
        codes = {
            role: child.end(max(0.0, deadline - time.monotonic()))
            for role, child in reversed(self._children.items())
        }
        self._children.clear()
        return codes

    def kill(self) -> None:
        self.stop(grace=0.5)


def _is_end(event: Event) -> bool:
    """Whether the child ended; what it printed instead of reporting goes into the log."""
    if "stray" in event.report:
        log.warning("%s printed: %s", event.role, event.report["stray"])
    return event.exit_code is not None
