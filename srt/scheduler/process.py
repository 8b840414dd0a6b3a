"""The scheduler's process: a plain loop around `turn`."""

from __future__ import annotations

from collections.abc import Callable

from srt.scheduler.loop import Scheduler
from srt.wire.channels import ChannelClosed, PollingReceiver
from srt.wire.messages import WorkMessage

IDLE_SECONDS = 1.0  # how often an idle loop looks whether to stop
# How long another thread of the process (one that compiles grammars) may keep the interpreter while the
# loop wants it. Python's own value is 5 ms, for every time that the loop has touched a socket.
SWITCH_SECONDS = 1e-4


def run(
    scheduler: Scheduler, inbox: PollingReceiver[WorkMessage], stop: Callable[[], bool]
) -> None:
    """Turns until `stop`, or until the inbox is closed. While there is work it polls. While there is
    none the worker does its chores, one between two looks into the inbox; when these are done it
    sleeps in the socket and uses no CPU.

    Raises what a step or a chore raised, after every live request got its terminal item; the caller
    exits non-zero.
    """
    is_busy, patience = False, 0.0
    while not stop():
        try:
            messages = inbox.drain(patience)
        except ChannelClosed:
            return
        if messages or is_busy:
            is_busy, patience = scheduler.turn(messages), 0.0
        else:
            patience = 0.0 if scheduler.idle() else IDLE_SECONDS
