"""The gateway on a real socket: keep-alive, hanging up, draining, quiet ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from gateway_engine import Item, ScriptedEngine, accepted, events, hello

from srt.gateway import GatewaySettings, create_app, serve
from srt.gateway.server import _listen
from srt.wire.messages import Generate

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Running:
    def __init__(self, engine: ScriptedEngine, settings: GatewaySettings) -> None:
        self.engine = engine
        self.app = create_app(engine, settings)
        self.stop = asyncio.Event()
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(
            serve(self.app, "127.0.0.1", 0, self.stop, self.port.set_result)
        )

    async def finish(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 20)


@asynccontextmanager
async def running(
    engine: ScriptedEngine, settings: GatewaySettings | None = None
) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    server = Running(engine, settings or GatewaySettings())
    port = await asyncio.wait_for(server.port, 20)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        try:
            yield server, http
        finally:
            await server.finish()


def gated(gate: asyncio.Event) -> ScriptedEngine:
    """The probe is answered at once; everything else waits after its first token."""

    def script(ask: Generate) -> list[Item]:
        first, second, *rest = hello(ask)
        return hello(ask) if ask.rid.startswith("probe-") else [first, second, gate, *rest]

    return ScriptedEngine(script)


async def test_it_serves_and_ends() -> None:
    async with running(ScriptedEngine()) as (server, http):
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        streamed = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert events(streamed)[-1] == "[DONE]" and "server" not in streamed.headers
        assert (await http.get("/ready")).status_code == 200
        assert server.engine.asked[0].rid.startswith("probe-")
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient() as late:
            await late.get(str(http.base_url))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_closed_socket_is_an_abort(stream: bool) -> None:
    engine = gated(asyncio.Event())
    async with running(engine) as (server, http):
        asking = asyncio.create_task(
            http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        )
        async with asyncio.timeout(10):
            while len(engine.asked) < 2:
                await asyncio.sleep(0.005)
            asking.cancel()
            while not engine.closed:
                await asyncio.sleep(0.005)
        assert engine.closed == [engine.asked[1].rid] and not server.app.state.gateway.live


async def test_an_open_stream_ends_in_the_drain_and_new_work_is_refused() -> None:
    gate = asyncio.Event()
    async with running(gated(gate)) as (server, http):
        body = {**CHAT, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            assert '"role"' in await anext(lines)
            server.stop.set()
            gateway = server.app.state.gateway
            async with asyncio.timeout(10):
                while not gateway.live.is_draining:
                    await asyncio.sleep(0.005)
            refused = await http.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert (await http.get("/ready")).status_code == 503
            gate.set()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"stop"' in rest[-2]
        await asyncio.wait_for(server.task, 20)


async def test_what_outlives_the_drain_does_not_keep_the_process() -> None:
    engine = gated(asyncio.Event())
    async with running(engine, GatewaySettings(drain_seconds=0.05)) as (server, http):
        asking = asyncio.create_task(
            http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        )
        async with asyncio.timeout(10):
            while len(engine.asked) < 2:
                await asyncio.sleep(0.005)
        await server.finish()
        assert engine.aborted == [None] and engine.closed
        with pytest.raises(httpx.HTTPError):
            await asking


async def test_a_large_body_is_refused_and_the_connection_lives() -> None:
    async with running(ScriptedEngine(), GatewaySettings(max_body_bytes=10_000)) as (_, http):
        large = await http.post("/v1/completions", json={"prompt": "x" * 3_000_000})
        assert large.status_code == 413
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with running(ScriptedEngine()) as (server, _):
        app = create_app(ScriptedEngine(lambda ask: [accepted(ask)]), GatewaySettings())
        with pytest.raises(OSError):
            await serve(app, "127.0.0.1", await server.port, asyncio.Event(), lambda port: None)


def test_small_writes_leave_at_once() -> None:
    """Whatever loop accepts: a second write must not wait for the receipt of the first."""
    with _listen("127.0.0.1", 0) as listener, socket.socket() as caller:
        caller.connect(listener.getsockname())
        accepted_socket, _ = listener.accept()
        with accepted_socket:
            assert accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
