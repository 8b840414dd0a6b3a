"""Wakes one coroutine. What an `asyncio.Event` does for many waiters, at a third of the price."""

from __future__ import annotations

import asyncio


class Bell:
    """One waiter, any number of ringers, one event loop. A ring that nobody waits for is lost: look
    first, then wait, without an `await` in between."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Until the next ring."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
