"""Asking it: over HTTP with a socket of its own for every request, over ZMQ with a few connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

import orjson

from bench.soak.judge import Outcome
from bench.soak.plan import Errand
from srt.client import AsyncClient
from srt.client.options import Options
from srt.errors import TandemError
from srt.wire.params import ChatMessage, SamplingParams

LIMIT = 120.0  # seconds after which an answer is lost
SAMPLING = set(SamplingParams.__struct_fields__)


async def carry_out(
    errand: Errand,
    ask: Callable[[Errand, Outcome], Awaitable[None]],
    abort: Callable[[Errand], Awaitable[None]],
) -> Outcome:
    """Asks, and cuts it off if that is its fate. What breaks is noted, never raised."""
    outcome = Outcome()
    asking = asyncio.ensure_future(ask(errand, outcome))
    try:
        if errand.cut:
            await asyncio.wait({asking}, timeout=errand.cut_after)
            if not asking.done() and errand.cut == "abort":
                await abort(errand)
            elif not asking.done():
                asking.cancel()
                with suppress(asyncio.CancelledError):
                    await asking
                return outcome
        await asyncio.wait_for(asking, LIMIT)
    except TandemError as error:
        outcome.error = error.code
    except (OSError, TimeoutError, EOFError, ValueError) as error:
        outcome.error = repr(error)
    finally:
        asking.cancel()
    return outcome


class ZmqCaller:
    def __init__(
        self, clients: list[AsyncClient], connect: Callable[[], Awaitable[AsyncClient]]
    ) -> None:
        self._clients = clients
        self._connect = connect

    async def run(self, errand: Errand) -> Outcome:
        if errand.cut != "leave":
            client = self._clients[errand.number % len(self._clients)]
            return await self._run(client, errand)
        client = await self._connect()
        outcome = Outcome()
        asking = asyncio.create_task(self._ask(client, errand, outcome))
        await asyncio.wait({asking}, timeout=errand.cut_after)
        await client.close()
        with suppress(TandemError):
            await asking
        return outcome

    async def _run(self, client: AsyncClient, errand: Errand) -> Outcome:
        return await carry_out(
            errand,
            lambda e, outcome: self._ask(client, e, outcome),
            lambda e: client.abort(e.name),
        )

    @staticmethod
    async def _ask(client: AsyncClient, errand: Errand, outcome: Outcome) -> None:
        given: dict[str, Any] = dict(errand.fields)
        if "logit_bias" in given:
            given["logit_bias"] = {int(key): bias for key, bias in given["logit_bias"].items()}
        params = SamplingParams(**{key: given[key] for key in SAMPLING & given.keys()})
        options: Options = {"rid": errand.name}
        if "n" in given:
            options["n"] = given["n"]
        if "priority" in given:
            options["priority"] = given["priority"]
        if "cache_salt" in given:
            options["cache_salt"] = given["cache_salt"]
        if not errand.stream:
            prompt = _messages(errand) if errand.is_chat else errand.prompt
            answer = await client.generate(prompt, params, **options)
            for sample in answer.samples:
                reason = None if sample.finish is None else sample.finish.reason
                outcome.add(sample.index, sample.text, reason)
        else:
            prompt = _messages(errand) if errand.is_chat else errand.prompt
            async with aclosing(client.stream(prompt, params, **options)) as outputs:
                async for item in outputs:
                    reason = None if item.finish is None else item.finish.reason
                    outcome.add(item.index, item.text, reason)
                    outcome.num_tokens += len(item.token_ids)
        outcome.has_ended = True


def _messages(errand: Errand) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=errand.prompt)]


class HttpCaller:
    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80

    async def run(self, errand: Errand) -> Outcome:
        return await carry_out(errand, self._ask, self._abort)

    async def _ask(self, errand: Errand, outcome: Outcome) -> None:
        body: dict[str, Any] = {**errand.fields, "stream": errand.stream}
        if errand.is_chat:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": errand.prompt}]
        else:
            path, body["prompt"] = "/v1/completions", errand.prompt
        body["request_id"] = errand.name
        async with aclosing(self._lines(path, body)) as lines:
            head = await anext(lines)
            if b" 200 " not in head or not errand.stream:
                answer = orjson.loads([line async for line in lines][-1])
                _take(answer, outcome)
                outcome.has_ended = True
                return
            async for line in lines:
                if line.startswith(b"data: [DONE]"):
                    outcome.has_ended = True
                elif line.startswith(b"data: "):
                    _take(orjson.loads(line[6:]), outcome)

    async def _abort(self, errand: Errand) -> None:
        async with aclosing(self._lines("/abort", {"request_id": errand.name})) as lines:
            async for _ in lines:
                pass

    async def _lines(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """The answer line by line, status first. Chunk headers of the transfer encoding never look like
        events, and JSON bodies are one line, so both can be read straight through."""
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=2**22)
        try:
            data = orjson.dumps(body)
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            async for line in reader:
                yield line
        finally:
            writer.close()


def _take(body: dict[str, Any], outcome: Outcome) -> None:
    if body.get("error"):
        outcome.error = body["error"]["code"]
    for choice in body.get("choices") or ():
        shown = choice.get("text")
        if shown is None:
            shown = (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        outcome.add(choice["index"], shown, choice.get("finish_reason"))
