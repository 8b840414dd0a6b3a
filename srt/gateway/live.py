"""The requests that this gateway has open, by the names their callers know."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from srt.errors import DuplicateRequest, ShuttingDown


class Live:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._rids: dict[str, tuple[str, ...]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._rids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rids

    def enter(self, request_id: str, rids: Iterable[str]) -> None:
        """Raises ShuttingDown while draining, DuplicateRequest if the name is in use."""
        if self.is_draining:
            raise ShuttingDown("the server is shutting down")
        if request_id in self._rids:
            raise DuplicateRequest(
                f"request_id {request_id!r} belongs to a live request", param="request_id"
            )
        self._rids[request_id] = tuple(rids)
        self._empty.clear()

    def leave(self, request_id: str) -> None:
        self._rids.pop(request_id, None)
        if not self._rids:
            self._empty.set()

    def rids(self, request_id: str) -> tuple[str, ...]:
        """The engine's names for a request; empty if it is not live."""
        return self._rids.get(request_id, ())

    def request_ids(self) -> list[str]:
        return list(self._rids)

    async def wait_empty(self, seconds: float) -> bool:
        """False if something is still open after `seconds`."""
        if self._empty.is_set():
            return True
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            return False
        return True
