"""The requests that wait: retracted ones in front, then the others in order of arrival."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from srt.errors import QueueFull
from srt.scheduler.request import Reason, Request

FINISHES_SMOOTHED = 8  # the mean time between finishes looks back about this far


class Queue:
    """Bounded in requests and in prompt tokens. Retracted requests were accepted before and count
    against neither bound."""

    def __init__(self, max_requests: int, max_tokens: int | None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._front: dict[int, Request] = {}
        self._arrived: dict[int, Request] = {}
        self.num_tokens = 0  # prompt tokens of the ones in order of arrival
        self._interval = 1.0  # seconds between finishes, smoothed
        self._last_finish: float | None = None

    def __len__(self) -> int:
        return len(self._front) + len(self._arrived)

    def __contains__(self, request: Request) -> bool:
        return request.uid in self._arrived or request.uid in self._front

    def __iter__(self) -> Iterator[Request]:
        return chain(self._front.values(), self._arrived.values())

    @property
    def front(self) -> list[Request]:
        return list(self._front.values())

    @property
    def arrived(self) -> list[Request]:
        return list(self._arrived.values())

    def check(self, num_tokens: int) -> QueueFull | None:
        """Is there room for a prompt of this length? An empty queue takes any one."""
        if len(self._arrived) >= self._max_requests:
            return QueueFull(
                f"{len(self._arrived)} requests wait already, as many as max_queued allows",
                retry_after=self._retry_after(),
            )
        limit = self._max_tokens
        if limit is not None and self._arrived and self.num_tokens + num_tokens > limit:
            return QueueFull(
                f"{self.num_tokens} prompt tokens wait already; {num_tokens} more would pass "
                f"max_queued_tokens {limit}",
                retry_after=self._retry_after(),
            )
        return None

    def _retry_after(self) -> float:
        """Seconds until about half of the queue is gone, at the pace of late; 1 to 60."""
        return round(min(max(self._interval * len(self._arrived) / 2, 1.0), 60.0), 1)

    def note_finish(self, now: float) -> None:
        """Some request ended: the pace that `retry_after` is estimated from."""
        if self._last_finish is not None:
            late = max(now - self._last_finish, 0.0)
            self._interval += (late - self._interval) / FINISHES_SMOOTHED
        self._last_finish = now

    def add(self, request: Request) -> None:
        self._arrived[request.uid] = request
        self.num_tokens += request.prompt_len

    def put_back(self, request: Request) -> None:
        """A retracted request, ahead of everybody but those retracted that came before it."""
        self._front[request.uid] = request
        ordered = sorted(self._front.values(), key=lambda r: r.sequence)
        self._front = {r.uid: r for r in ordered}

    def remove(self, request: Request) -> None:
        if self._front.pop(request.uid, None) is None:
            del self._arrived[request.uid]
            self.num_tokens -= request.prompt_len

    def position(self, request: Request) -> int | None:
        """How many are ahead of it in this order; None if it does not wait."""
        for index, other in enumerate(self):
            if other is request:
                return index
        return None

    def reasons(self) -> Counter[Reason]:
        """How many wait for what. Most share one refusal, so these are counted by identity first."""
        held = [request.refusal for request in self]
        keys = list(map(id, held))
        named = dict(zip(keys, held, strict=True))
        reasons: Counter[Reason] = Counter()
        for key, count in Counter(keys).items():
            refusal = named[key]
            assert refusal is not None, "whoever waits has a reason"
            reasons[refusal.reason] += count
        return reasons
