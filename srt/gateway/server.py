"""The gateway on a socket: uvicorn, told to keep quiet, to leave signals alone, and to drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from srt.gateway.connection import Connection
from srt.gateway.feed import settle
from srt.gateway.state import Gateway

logger = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, which sets `stop`."""
        yield


async def serve(
    app: FastAPI, host: str, port: int, stop: asyncio.Event, ready: Callable[[int], None]
) -> None:
    """Runs until `stop` is set and what is open has ended or its time is over. Calls `ready` with the
    port, which is a free one if `port` is 0. Raises OSError if the address cannot be had."""
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if server.started:
            bound = int(listener.getsockname()[1])
            logger.info("listening on %s port %d", host, bound)
            ready(bound)
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            gateway: Gateway = app.state.gateway
            await gateway.drain()
            server.should_exit = True
        await serving
    finally:
        await settle(serving, stopping)
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    # Connections inherit it. asyncio's own loop sets it on sockets made with an explicit TCP protocol
    # only; without it the second write of an answer waits about 40 ms for the first one's receipt.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
