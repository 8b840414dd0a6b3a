"""What happened to one request, on the client's clock, in seconds from the start of the run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Record:
    """`due`: when the schedule wanted it sent; `sent`: just before its bytes were written, so the
    client's own queueing shows; `arrivals`: (time, tokens) of every piece that carried text."""

    due: float = 0.0
    sent: float = 0.0
    end: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: str = ""
    text: str = ""
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None and bool(self.arrivals)

    @property
    def queued(self) -> float:
        return self.sent - self.due

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.sent

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None for a one-token answer."""
        if self.completion_tokens < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.completion_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Gaps between pieces, each divided by its tokens."""
        times = self.arrivals
        return [
            (here[0] - before[0]) / max(1, here[1])
            for before, here in zip(times, times[1:], strict=False)
        ]

    @property
    def largest_gap(self) -> float:
        times = [time for time, _ in self.arrivals]
        return max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0)
