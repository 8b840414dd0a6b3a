"""What comes before and instead of a request: silence, half requests, garbage. On real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from gateway_engine import ScriptedEngine, accepted, hello

from srt.gateway import GatewaySettings, create_app, serve
from srt.gateway.connection import MAX_HEAD_BYTES
from srt.wire.messages import Generate

BODY = json.dumps({"prompt": "hi"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
SOON = GatewaySettings(receive_seconds=0.05)
PATIENT = GatewaySettings(receive_seconds=1000.0)


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: dict[str, Any]


class Line:
    """A socket that says exactly what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Answer:
        async with asyncio.timeout(20):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = [line.split(": ", 1) for line in head[1:] if line]
            headers = {name.lower(): value for name, value in pairs}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(head[0].split()[1]), headers, json.loads(body))

    async def rest(self) -> bytes:
        """What comes until the server hangs up."""
        try:
            return await asyncio.wait_for(self.reader.read(), 20)
        except ConnectionResetError:
            return b""


@asynccontextmanager
async def listening(
    settings: GatewaySettings, engine: ScriptedEngine | None = None
) -> AsyncIterator[tuple[Any, Any]]:
    """The gateway and a function that connects to it."""
    app = create_app(engine or ScriptedEngine(), settings)
    stop = asyncio.Event()
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, "127.0.0.1", 0, stop, found.set_result))
    port = await asyncio.wait_for(found, 20)
    lines: list[Line] = []

    async def connect() -> Line:
        lines.append(Line(*await asyncio.open_connection("127.0.0.1", port)))
        return lines[-1]

    try:
        yield app.state.gateway, connect
    finally:
        for line in lines:
            line.writer.close()
        stop.set()
        await asyncio.wait_for(serving, 20)


HALVES = [
    HEAD[:20],
    HEAD,
    HEAD + b"Content-Length: 500\r\n\r\n",
    HEAD + b"Content-Length: 500\r\n\r\n" + BODY,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"pro",
    b"GET /health HTTP/1.1\r\nHost:",
]  # fmt: skip


@pytest.mark.parametrize("half", HALVES)
async def test_half_a_request_ends_in_a_408(half: bytes) -> None:
    async with listening(SOON) as (gateway, connect):
        line = await connect()
        line.say(half)
        answer = await line.answer()
        assert answer.status == 408 and answer.body["error"]["code"] == "timeout"
        assert "--receive-seconds" in answer.body["error"]["message"]
        assert answer.body["error"]["type"] == "invalid_request_error"
        assert answer.headers["connection"] == "close" and answer.headers["x-request-id"]
        assert answer.headers["x-should-retry"] == "false"
        assert await line.rest() == b"" and not gateway.live
        fresh = await connect()
        fresh.say(WHOLE)
        assert (await fresh.answer()).status == 200


@pytest.mark.parametrize("words", [b"", b"\r\n", b"\r\n\r\n"])
async def test_silence_is_hung_up_on(words: bytes) -> None:
    async with listening(SOON) as (_, connect):
        line = await connect()
        line.say(words)
        assert await line.rest() == b""


GARBAGE = [
    b"hello\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    HEAD + b"Content-Length: x\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: t\r\n\r\n",
]


@pytest.mark.parametrize("words", GARBAGE)
async def test_what_is_not_http_is_answered_in_json(words: bytes) -> None:
    async with listening(PATIENT) as (gateway, connect):
        line = await connect()
        line.say(words)
        answer = await line.answer()
        assert answer.status in (400, 404) and answer.headers["content-type"] == "application/json"
        assert answer.body["error"]["type"] == "invalid_request_error"
        if answer.status == 400:
            is_length = b"Content-Length" in words
            assert ("Content-Length" in answer.body["error"]["message"]) is is_length
            assert await line.rest() == b""
        assert not gateway.live


async def test_a_head_has_a_largest_size() -> None:
    async with listening(PATIENT) as (_, connect):
        line = await connect()
        line.say(HEAD + b"X-Long: " + b"x" * (MAX_HEAD_BYTES + 1))
        answer = await line.answer()
        assert answer.status == 413 and str(MAX_HEAD_BYTES) in answer.body["error"]["message"]
        fits = await connect()
        fits.say(HEAD + b"X-Long: " + b"x" * 50_000 + b"\r\n" + WHOLE.removeprefix(HEAD))
        assert (await fits.answer()).status == 200


@pytest.mark.parametrize("where", ["field", "fields", "url"])
async def test_a_large_head_that_comes_whole_is_refused_too(where: str) -> None:
    """Its end and its body, in the same piece, do not hide its size."""
    size = MAX_HEAD_BYTES - len(HEAD) - 100
    for extra, status in ((0, 200), (200, 413)):
        async with listening(PATIENT) as (gateway, connect):
            path = b"POST /v1/completions"
            big = b"x" * (size + extra)
            if where == "field":
                whole = WHOLE.replace(b"Host", b"X-Long: " + big + b"\r\nHost", 1)
            elif where == "fields":
                whole = WHOLE.replace(b"Host", b"X-Long: x\r\n" * (len(big) // 11) + b"Host", 1)
            else:
                whole = WHOLE.replace(path, path + b"?" + big, 1)
            line = await connect()
            line.say(WHOLE)
            assert (await line.answer()).status == 200
            line.say(whole)
            answer = await line.answer()
            assert answer.status == status
            if status == 413:
                assert str(MAX_HEAD_BYTES) in answer.body["error"]["message"]
                assert await line.rest() == b""
            assert not gateway.live


async def test_a_large_body_before_a_head_is_not_counted_with_it() -> None:
    async with listening(PATIENT) as (_, connect):
        body = json.dumps({"prompt": "hi", "metadata": {"x": "y" * 100_000}}).encode()
        line = await connect()
        line.say(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body[:10])
        await asyncio.sleep(0.05)
        line.say(body[10:] + WHOLE[:20])
        assert (await line.answer()).status == 200
        line.say(WHOLE[20:])
        assert (await line.answer()).status == 200


async def test_a_body_in_many_pieces_is_served_and_the_connection_lives() -> None:
    async with listening(PATIENT) as (_, connect):
        line = await connect()
        for _ in range(3):
            for byte in WHOLE:
                line.say(bytes([byte]))
                await asyncio.sleep(0)
            assert (await line.answer()).status == 200
        line.say(WHOLE + WHOLE + b"\r\n" + WHOLE)  # at once, and one after an empty line
        assert [(await line.answer()).status for _ in range(3)] == [200] * 3


async def test_an_answer_under_way_is_not_disturbed_by_what_follows() -> None:
    """The clock of a half request behind it waits; it is cut when the answer is through."""
    gate = asyncio.Event()

    def script(ask: Generate) -> list[Any]:
        return (
            hello(ask) if ask.rid.startswith("probe-") else [accepted(ask), gate, *hello(ask)[1:]]
        )

    engine = ScriptedEngine(script)
    async with listening(SOON, engine) as (_, connect):
        line = await connect()
        line.say(WHOLE + HEAD[:20])
        async with asyncio.timeout(20):
            while len(engine.asked) < 2:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)
        gate.set()
        assert (await line.answer()).status == 200
        assert (await line.answer()).status == 408


async def test_garbage_behind_a_request_is_never_its_answer() -> None:
    gate = asyncio.Event()

    def script(ask: Generate) -> list[Any]:
        return (
            hello(ask) if ask.rid.startswith("probe-") else [accepted(ask), gate, *hello(ask)[1:]]
        )

    engine = ScriptedEngine(script)
    async with listening(PATIENT, engine) as (gateway, connect):
        line = await connect()
        line.say(WHOLE)
        async with asyncio.timeout(20):
            while len(engine.asked) < 2:
                await asyncio.sleep(0.005)
        line.say(b"garbage\r\n\r\n")
        assert await line.rest() == b""
        async with asyncio.timeout(20):
            while gateway.live:
                await asyncio.sleep(0.005)


async def test_an_offer_of_http_2_is_declined_and_the_request_served() -> None:
    """Some clients offer an upgrade with their first request."""
    async with listening(PATIENT) as (_, connect):
        line = await connect()
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n"
        line.say(HEAD + offer + WHOLE.removeprefix(HEAD))
        assert (await line.answer()).status == 200
