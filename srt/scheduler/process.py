"""The scheduler's process: a plain loop around `turn`."""

from __future__ import annotations

from collections.abc import Callable

from srt.scheduler.loop import Scheduler
from srt.wire.channels import ChannelClosed, PollingReceiver
from srt.wire.messages import WorkMessage

IDLE_SECONDS = 1.0  # how often an idle loop looks whether to stop


def run(
    scheduler: Scheduler, inbox: PollingReceiver[WorkMessage], stop: Callable[[], bool]
) -> None:
    """Turns until `stop`, or until the inbox is closed. While there is work it polls; while there is
    none it sleeps in the socket and uses no CPU.

    Raises what a step raised, after every live request got its terminal item; the caller exits
    non-zero.
    """
    is_busy = False
    while not stop():
        try:
            messages = inbox.drain(0 if is_busy else IDLE_SECONDS)
        except ChannelClosed:
            return
        if messages or is_busy:
            is_busy = scheduler.turn(messages)
