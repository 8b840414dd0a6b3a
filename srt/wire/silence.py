"""How long the other side has said nothing."""

from __future__ import annotations


class Silence:
    """A stopwatch that is read about every `tick` seconds. The time in which this process itself did
    not run (suspended, or busy with something long) counts as two ticks at most: what was said
    meanwhile lies unread, so it proves nothing about the other side."""

    def __init__(self, tick: float, now: float) -> None:
        self._most = 2 * tick
        self._last = now
        self.seconds = 0.0

    def heard(self) -> None:
        """The peer spoke: silence counts from 0 again."""
        self.seconds = 0.0

    def advance(self, now: float) -> float:
        """Seconds of silence, as of the monotonic time `now`."""
        self.seconds += min(now - self._last, self._most)
        self._last = now
        return self.seconds
