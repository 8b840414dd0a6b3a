"""What has arrived for one request and was not read yet."""

from __future__ import annotations

from collections import deque

from srt.client.bell import Bell
from srt.errors import RequestAborted, TandemError
from srt.wire.convert import from_failure
from srt.wire.messages import Output


class Mailbox:
    """One writer (the connection), one reader (the caller), one event loop.

    `limit`: items that may wait. Past it the box takes no more and its reader gets RequestAborted
    after what is there.
    """

    def __init__(self, rid: str, n: int, limit: int) -> None:
        self.rid = rid
        self.is_abandoned = False  # nobody reads any more; only the ends are counted
        self.is_overfull = False
        self._limit = limit
        self._open = n
        self._items: deque[Output] = deque()
        self._error: TandemError | None = None
        self._arrived = Bell()

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self._open <= 0 or self._error is not None and not self.is_overfull

    def put(self, item: Output) -> None:
        """A piece from the engine; past `limit` it is dropped and the reader is told."""
        if item.finish is not None:
            self._open -= 1
        if self.is_abandoned or self.is_overfull:
            return
        self._items.append(item)
        if len(self._items) > self._limit:
            self.is_overfull = True
            self._error = RequestAborted(
                f"{self._limit} pieces waited unread; the request was aborted"
            )
        self._arrived.ring()

    def fail(self, error: TandemError) -> None:
        """Nothing more comes: the reader gets what is there, then the first such error."""
        self._error = self._error or error
        self._open = 0
        self._arrived.ring()

    async def take(self) -> Output | None:
        """The next item; None after the last end. Raises what the request failed with, after all that
        came before."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self.is_over:
                return None
            await self._arrived.wait()
        item = self._items.popleft()
        if item.finish is not None and item.finish.reason == "error":
            assert item.finish.failure is not None, "an error finish says what failed"
            raise from_failure(item.finish.failure)
        return item
