"""An engine that is stopped, or loses its parent, before all of its processes are ready: at once."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from srt.config.args import ServerArgs
from srt.launch.child import Child, Event
from srt.launch.control import GRACE_SECONDS
from srt.launch.prepare import prepare
from srt.launch.supervisor import STOP_SECONDS, Supervisor

STOPPED = ("detokenizer", "tokenizer", "scheduler")


def ending(events: queue.SimpleQueue[Event]) -> int:
    while True:
        event = events.get(timeout=5.0)
        if event.exit_code is not None:
            return event.exit_code


@pytest.mark.parametrize("reason", ["SIGTERM", "no parent"])
def test_a_gateway_waits_for_no_tokenizer_then(
    tmp_path: Path, script: Callable[..., str], reason: str
) -> None:
    args, folder = ServerArgs(model=script(["a"]), port=0), str(tmp_path)
    boot, _ = prepare(args, {}, folder=folder, cache_folder=folder)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    gateway = Child("gateway", boot.encode(), events, os.environ)
    try:
        while "tokenizer" not in events.get(timeout=20.0).report.get("phase", ""):
            pass
        time.sleep(0.3)  # it connects
        if reason == "SIGTERM":
            gateway.ask_to_stop()
            assert ending(events) == 0
        else:
            assert gateway.end(GRACE_SECONDS - 1) == 0
    finally:
        gateway.end(0)


def test_nobody_is_waited_for_who_never_was_ready() -> None:
    """Frozen processes stand for busy ones: no drain, and one time for all of them to leave in."""
    supervisor = Supervisor(boot=b"", roles=STOPPED, environment=os.environ)
    supervisor.start(is_stopping=lambda: True)
    for pid in supervisor.pids.values():
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    assert supervisor.drain(30.0) is None
    assert time.monotonic() - began < 0.5
    codes = supervisor.stop(1.0)
    assert codes.keys() == {*STOPPED}
    assert {*codes.values()} <= {-signal.SIGTERM, -signal.SIGKILL}  # whichever it sees first
    assert time.monotonic() - began < 1.9
    assert STOP_SECONDS + 1 < GRACE_SECONDS  # or an ordinary end would show where its threads are
