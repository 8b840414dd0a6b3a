"""Questions that the scheduler answers, by ticket. Pure: the clock is an argument."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from srt.errors import InvalidRequest
from srt.wire.messages import Ask, Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    peer: bytes
    rid: str
    topic: str
    until: float  # monotonic seconds


class Questions:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tickets = itertools.count(1)
        self._open: dict[int, Question] = {}

    def add(self, peer: bytes, ask: Ask, now: float) -> Command:
        """The command to send. Raises InvalidRequest for a wait that is no number of seconds."""
        until = now + self._seconds
        if ask.topic == "flush_cache" and ask.argument:
            until += _read_wait(ask.argument)
        ticket = next(self._tickets)
        self._open[ticket] = Question(peer=peer, rid=ask.rid, topic=ask.topic, until=until)
        return Command(ticket=ticket, topic=ask.topic, argument=ask.argument)

    def close(self, ticket: int) -> Question | None:
        return self._open.pop(ticket, None)

    def expired(self, now: float) -> list[Question]:
        """Those past their time, closed. `now` infinity: all."""
        late = [ticket for ticket, question in self._open.items() if question.until <= now]
        return [self._open.pop(ticket) for ticket in late]


def _read_wait(argument: str) -> float:
    try:
        seconds = float(argument)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 3600:
        raise InvalidRequest(
            f"flush_cache waits 0 to 3600 seconds, not {argument!r}", param="argument"
        )
    return seconds
