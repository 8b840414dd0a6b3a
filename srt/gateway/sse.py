"""Server-sent events: the bytes, and the response that sends them.

Three tasks per stream: one reads the engine, one writes the socket, one notices that the caller has
gone. Events that pile up while the socket is busy leave in one write; too many end the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from srt.client.bell import Bell
from srt.gateway.feed import settle, wait_gone

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


class SlowReader(Exception):
    """The caller reads more slowly than the engine writes, by more than the buffer."""


class Outbox:
    """What is to be written. `put` never waits; past `limit` unread bytes it raises SlowReader."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._filled = Bell()
        self._is_closed = False
        self._clock = asyncio.get_running_loop().time
        self.last_put = self._clock()  # seconds, for the pings

    def put(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        self.last_put = self._clock()
        self._filled.ring()
        if self._size > self._limit:
            raise SlowReader

    def silence(self) -> float:
        """Seconds since something was put."""
        return self._clock() - self.last_put

    def close(self) -> None:
        self._is_closed = True
        self._filled.ring()

    async def take(self) -> bytes | None:
        """All there is; None when closed and empty. Waits otherwise."""
        while not self._parts:
            if self._is_closed:
                return None
            await self._filled.wait()
        data = b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        return data


class EventStream(Response):
    """Sends `events` until they end. `on_end` always runs, once, with how it ended: done, gone, slow."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[str], Awaitable[None]],
        *,
        headers: dict[str, str],
        ping_seconds: float,
        buffer_bytes: int,
    ) -> None:
        self._events = events
        self._on_end = on_end
        self._ping_seconds = ping_seconds
        self._buffer_bytes = buffer_bytes
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox = Outbox(self._buffer_bytes)
        reader = asyncio.create_task(self._read(outbox))
        writer = asyncio.create_task(self._write(outbox, send))
        gone = asyncio.create_task(wait_gone(receive))
        pinger = asyncio.create_task(self._ping(outbox))
        open_ends: set[asyncio.Task[None]] = {reader, writer, gone}
        ending = "gone"
        try:
            while not writer.done() and not gone.done():
                done, open_ends = await asyncio.wait(open_ends, return_when=asyncio.FIRST_COMPLETED)
                if reader in done and reader.exception() is not None:
                    ending = "slow"
                    break
            if writer.done() and writer.exception() is None:
                ending = "done"
        finally:
            await settle(reader, writer, gone, pinger)
            await self._events.aclose()
            await self._on_end(ending)

    async def _read(self, outbox: Outbox) -> None:
        async for data in self._events:
            outbox.put(data)
        outbox.close()

    async def _write(self, outbox: Outbox, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while (data := await outbox.take()) is not None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, outbox: Outbox) -> None:
        while True:
            rest = self._ping_seconds - outbox.silence()
            if rest > 0:
                await asyncio.sleep(rest)
            else:
                outbox.put(PING)
