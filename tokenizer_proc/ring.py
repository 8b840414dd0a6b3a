"""The heartbeat through all three processes, as numbers. Pure: the clock is an argument."""

from __future__ import annotations

from srt.wire.messages import Turn
from srt.wire.silence import Silence


class Ring:
    """A `Turn` each second, or four in the time of a stall if that is shorter; one at a time. A lost
    one is replaced only after a whole stall, so that a stopped engine does not find thousands of them
    when it wakes up. Times in seconds, monotonic."""

    def __init__(self, stall_seconds: float, tick: float, now: float) -> None:
        self._stall_seconds = stall_seconds
        self._period = min(1.0, stall_seconds / 4)
        self._silence = Silence(tick, now)
        self._number = 0
        self._sent = -float("inf")
        self._is_back = True
        self._is_broken = False
        self.has_turned = False

    @property
    def age(self) -> float:
        """Seconds since it was last seen to turn (or since the start)."""
        return self._silence.seconds

    @property
    def is_stalled(self) -> bool:
        """Loading weights may take its time: before the first turn only a death counts."""
        return self._is_broken or (self.has_turned and self.age > self._stall_seconds)

    def cut(self) -> None:
        """One of the processes died: it will never turn again."""
        self._is_broken = True

    def beat(self, now: float) -> Turn | None:
        """The turn to send now, if one is due. Call it every tick."""
        self._silence.advance(now)
        due = self._period if self._is_back else self._stall_seconds
        if now - self._sent < due:
            return None
        self._number += 1
        self._sent = now
        self._is_back = False
        return Turn(number=self._number)

    def returned(self, turn: Turn) -> None:
        self._silence.heard()
        self.has_turned = True
        self._is_back = self._is_back or turn.number == self._number
