"""The outputs of one call: one engine request per prompt, merged in the order things happen."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from starlette.types import Receive

from srt.errors import InternalError, RequestAborted
from srt.gateway.engine import Engine
from srt.wire.convert import from_failure
from srt.wire.messages import Generate, Output

T = TypeVar("T")
Item = tuple[int, Output]  # which prompt, what


class ClientGone(Exception):
    """The caller closed the connection. Nobody is there to be told."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; cancel it when the caller hangs up. The request's body must have been read.

    Raises ClientGone, and what `work` raises."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await settle(task, gone)


async def wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def settle(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its end, so that its clean-up has happened."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Feed:
    """Iterate after `open`. `aclose` aborts whatever is not finished."""

    def __init__(self, engine: Engine, asks: list[Generate]) -> None:
        self._engine = engine
        self._asks = asks
        self._waiting: deque[Item] = deque()  # came before every prompt was accepted
        self.accepted: dict[int, Output] = {}  # by prompt
        self._left = sum(ask.n for ask in asks)  # terminal items to come
        self._single: AsyncGenerator[Output, None] | None = None
        self._merged: asyncio.Queue[Item | Exception] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Send everything and wait until all of it is accepted. Raises what refused it."""
        if len(self._asks) == 1:
            self._single = self._engine.stream_request(self._asks[0])
        else:
            self._pumps = [
                asyncio.create_task(self._pump(place, ask)) for place, ask in enumerate(self._asks)
            ]
        while len(self.accepted) < len(self._asks):
            place, output = await self._next()
            if output.accepted:
                self.accepted[place] = output
            elif place not in self.accepted:  # aborted before that: raises so
                self._counted((place, output))
            self._waiting.append((place, output))

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> Item:
        """Ends after the last terminal item. Raises the first failure."""
        if self._waiting:
            return self._counted(self._waiting.popleft())
        if not self._left:
            raise StopAsyncIteration
        return self._counted(await self._next())

    def _counted(self, item: Item) -> Item:
        finish = item[1].finish
        if finish is not None:
            self._left -= 1
            if finish.reason not in ("stop", "length"):
                if finish.failure is not None:
                    raise from_failure(finish.failure)
                if finish.reason == "abort":
                    raise RequestAborted("the request was aborted")
                raise InternalError("the request ended in an error that has no name")
        return item

    async def _next(self) -> Item:
        if self._single is not None:
            try:
                return 0, await anext(self._single)
            except StopAsyncIteration:
                raise InternalError("the request ended without a terminal item") from None
        item = await self._merged.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def _pump(self, place: int, ask: Generate) -> None:
        stream = self._engine.stream_request(ask)
        left = ask.n
        try:
            async for output in stream:
                self._merged.put_nowait((place, output))
                left -= output.finish is not None
            if left:
                raise InternalError("the request ended without a terminal item")
        except Exception as error:
            self._merged.put_nowait(error)
        finally:
            await stream.aclose()

    async def aclose(self) -> None:
        await settle(*self._pumps)
        if self._single is not None:
            await self._single.aclose()
