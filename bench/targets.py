"""Whom we ask: an engine over ZMQ, or any OpenAI-compatible server over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Protocol
from urllib.parse import urlsplit

import orjson

from bench.record import Record
from bench.workloads import Item
from srt.client import AsyncClient
from srt.wire.params import ChatMessage, SamplingParams

Turns = list[tuple[str, str]]  # (role, text) of what was said before


class Target(Protocol):
    async def ask(self, item: Item, history: Turns, record: Record, start: float) -> None:
        """Fills the record; never raises for what the server did wrong."""
        ...


class ZmqTarget:
    """The client library: token counts are exact per piece."""

    def __init__(self, client: AsyncClient, *, temperature: float = 0.0) -> None:
        self._client = client
        self._temperature = temperature

    async def ask(self, item: Item, history: Turns, record: Record, start: float) -> None:
        params = SamplingParams(
            max_tokens=item.max_tokens, temperature=self._temperature, ignore_eos=True
        )
        text = item.prefix + item.prompt
        prompt: str | list[ChatMessage] = text
        if item.session is not None:
            turns = [*history, ("user", text)]
            prompt = [ChatMessage(role=role, content=said) for role, said in turns]
        record.sent = time.perf_counter() - start
        try:
            async for output in self._client.stream(prompt, params):
                now = time.perf_counter() - start
                if output.token_ids:
                    record.arrivals.append((now, len(output.token_ids)))
                    record.text += output.text
                if output.finish is not None:
                    record.finish = output.finish.reason
                    record.prompt_tokens = output.finish.usage.prompt_tokens
                    record.completion_tokens = output.finish.usage.completion_tokens
                    record.cached_tokens = output.finish.usage.cached_tokens
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"
        record.end = time.perf_counter() - start


class HttpTarget:
    """One plain HTTP/1.1 connection per request, closed after it, read with as little work as possible,
    since the client shares the machine with the server it measures."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        temperature: float = 0.0,
        api_key: str | None = None,
        ignore_eos: bool = True,
    ) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self._fields = {"model": model, "temperature": temperature, "stream": True}
        self._fields["stream_options"] = {"include_usage": True}
        if ignore_eos:
            self._fields["ignore_eos"] = True
        self._key = api_key

    def _request(self, item: Item, history: Turns) -> bytes:
        text = item.prefix + item.prompt
        body: dict[str, object]
        if item.session is None:
            path, body = "/v1/completions", {"prompt": text}
        else:
            turns = [*history, ("user", text)]
            messages = [{"role": role, "content": said} for role, said in turns]
            path, body = "/v1/chat/completions", {"messages": messages}
        payload = orjson.dumps({**self._fields, **body, "max_tokens": item.max_tokens})
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
            "Connection: close\r\n"
        )
        if self._key:
            head += f"Authorization: Bearer {self._key}\r\n"
        return head.encode() + b"\r\n" + payload

    async def ask(self, item: Item, history: Turns, record: Record, start: float) -> None:
        record.sent = time.perf_counter() - start
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write(self._request(item, history))
                async for event in self._events(reader):
                    self._take(orjson.loads(event), record, time.perf_counter() - start)
            finally:
                writer.close()
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"
        record.end = time.perf_counter() - start

    async def _events(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """The data of each event. Chunk headers of the transfer encoding never look like events, so the
        lines can be read straight through them."""
        status = await reader.readline()
        if b" 200 " not in status:
            body = await reader.read(65536)
            raise ConnectionError(f"{status.decode().strip()} {body[-500:].decode()!r}")
        async for line in reader:
            if line.startswith(b"data: {"):
                yield line[6:]
            elif line.startswith(b"data: [DONE]"):
                return

    @staticmethod
    def _take(event: dict[str, object], record: Record, now: float) -> None:
        if event.get("error"):
            record.error = str(event["error"])
        for choice in event.get("choices") or []:  # type: ignore[attr-defined]
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                record.arrivals.append((now, 1))
                record.text += text
            record.finish = choice.get("finish_reason") or record.finish
        usage = event.get("usage")
        if isinstance(usage, dict):
            record.prompt_tokens = usage["prompt_tokens"]
            record.completion_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            record.cached_tokens = details.get("cached_tokens") or 0
