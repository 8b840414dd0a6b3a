"""What the cases of faults share: a neighbour that must not be disturbed, a probe, the balance of an
idle engine, streams over HTTP, and sockets that are cut."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from srt.client import SamplingParams
from srt.wire.messages import Output
from tests.process.conftest import Running

GREEDY = SamplingParams(temperature=0.0)
JSON = {"content-type": "application/json"}


async def metric(running: Running, name: str) -> float:
    """The sum over all labels of one of the engine's metrics."""
    entry = (await running.client.metrics())[f"tandem_{name}"]
    return float(sum(value for _, value in entry["samples"]))


async def balance(running: Running) -> None:
    """The engine comes to rest, and then nothing is held and no rule is broken."""
    for _ in range(200):
        health, found = await running.client.health(), await running.client.requests()
        if health["live"] == found["running"] == found["waiting"] == 0:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError(f"still live: {found}")
    await running.settle()
    for name, entry in (await running.client.metrics()).items():
        if entry["type"] != "histogram":
            assert all(value >= 0 for _, value in entry["samples"]), name
    for name in ("kv_tokens_used", "requests_running", "requests_waiting", "waiting_tokens"):
        assert await metric(running, name) == 0, name


async def probe(running: Running, expected: str = "pong", prompt: str = "ping") -> None:
    """A plain request is answered as ever."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    async with running.http() as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected


@asynccontextmanager
async def neighbour(running: Running, prompt: str, expected: str) -> AsyncIterator[None]:
    """A stream that lives through what the block does; each of its pieces must be as ever."""
    outputs: list[Output] = []
    begun = asyncio.Event()

    async def read() -> None:
        async for output in running.client.stream(prompt, GREEDY):
            outputs.append(output)
            if output.token_ids:
                begun.set()

    reading = asyncio.create_task(read())
    await asyncio.wait({reading, begun_task := asyncio.create_task(begun.wait())}, timeout=10)
    begun_task.cancel()
    try:
        yield
    finally:
        await reading
    assert "".join(output.text for output in outputs) == expected
    assert sum(output.finish is not None for output in outputs) == 1
    await balance(running)
    await probe(running)


@dataclass(slots=True)
class Streamed:
    """One choice of a stream, put together."""

    deltas: list[str] = field(default_factory=list)
    reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.deltas)


@dataclass(slots=True)
class Stream:
    choices: dict[int, Streamed] = field(default_factory=dict)
    usages: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)


def read_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event; the stream must be whole and valid UTF-8."""
    assert answer.status_code == 200, answer.text
    events = answer.content.decode("utf-8").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-3:]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2] if event[0] != ":"]


async def stream(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Stream:
    """Chat or completions, streamed."""
    found = Stream()
    found.bodies = read_events(await http.post(path, json={**body, "stream": True}))
    for event in found.bodies:
        assert "error" not in event, event
        if event.get("usage"):
            found.usages.append(event["usage"])
        for choice in event["choices"]:
            kept = found.choices.setdefault(choice["index"], Streamed())
            delta = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            assert kept.reason is None or not delta, "text after the end"
            kept.deltas.append(delta)
            kept.reason = choice["finish_reason"] or kept.reason
    return found


async def both_ways(
    http: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions"
) -> tuple[str, str]:
    """Text and finish reason of the first choice: the same streamed and whole."""
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, (body, answer.text)
    answer.content.decode("utf-8")
    choice = answer.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    streamed = (await stream(http, path, body)).choices[0]
    assert (streamed.text, streamed.reason) == (text, choice["finish_reason"])
    return text, choice["finish_reason"]


class Caller:
    """A plain socket with one HTTP request on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def post(cls, url: str, path: str, body: dict[str, Any] | bytes, **more: str) -> Caller:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Host": host, "Content-Length": str(len(data)), **JSON, **more}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        await writer.drain()
        return cls(reader, writer)

    async def read_until(self, word: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(word), 20)

    async def cut(self, *, reset: bool = False) -> None:
        """Hangs up: politely, or with a reset as after a crash."""
        if reset:
            linger = struct.pack("ii", 1, 0)
            raw = self._writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass
