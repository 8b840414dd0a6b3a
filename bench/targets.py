"""Whom we ask: an engine over ZMQ, or any OpenAI-compatible server over HTTP.

A `Target` answers requests; a `Server` also tokenizes, empties its cache and describes itself.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from bench.record import Record
from bench.workloads import Item
from srt.client import AsyncClient
from srt.errors import ConfigError, TandemError
from srt.wire.params import ChatMessage, SamplingParams

Turns = list[tuple[str, str]]  # (role, text) of what was said before
FLUSH_SECONDS = 5  # for running requests to end


class Target(Protocol):
    async def ask(self, item: Item, history: Turns, record: Record, start: float) -> None:
        """Fills the record; never raises for what the server did wrong."""
        ...


class Server(Target, Protocol):
    async def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, without a start token. Raises ConfigError if it cannot."""
        ...

    async def flush_cache(self) -> None:
        """Forgets every prefix. Raises ConfigError if it cannot."""
        ...

    async def describe(self) -> dict[str, Any] | None:
        """Its configuration and versions; None if it does not say."""
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
        prompt: str | list[int] | list[ChatMessage] = text
        if item.token_ids is not None:
            prompt = list(item.token_ids)
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

    async def tokenize(self, text: str) -> list[int]:
        return (await self._client.tokenize(text, add_special_tokens=False)).token_ids

    async def flush_cache(self) -> None:
        try:
            await self._client.flush_cache(wait=FLUSH_SECONDS)
        except TandemError as error:
            raise ConfigError(f"the engine does not empty its cache: {error.message}") from None

    async def describe(self) -> dict[str, Any] | None:
        return await self._client.engine_config()


class HttpTarget:
    """One plain HTTP/1.1 connection per request, closed after it, read with as little work as possible,
    since the client shares the machine with the server it measures. A piece of text counts as one token
    in `itl`: where several come at once (speculation), compare TPOT or measure over ZMQ."""

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
        if address.scheme != "http" or address.hostname is None:
            raise ConfigError(f"--url {url} must look like http://HOST:PORT")
        self._host, self._port = address.hostname, address.port or 80
        self._url = url.rstrip("/")
        self._fields = {"model": model, "temperature": temperature, "stream": True}
        self._fields["stream_options"] = {"include_usage": True}
        if ignore_eos:
            self._fields["ignore_eos"] = True
        self._key = api_key

    def _request(self, item: Item, history: Turns) -> bytes:
        text = item.prefix + item.prompt
        body: dict[str, object]
        if item.session is None:
            prompt = text if item.token_ids is None else item.token_ids
            path, body = "/v1/completions", {"prompt": prompt}
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

    async def tokenize(self, text: str) -> list[int]:
        body = {"model": self._fields["model"], "prompt": text, "add_special_tokens": False}
        answer = await asyncio.to_thread(self._call, "/tokenize", body)
        if answer is None or not isinstance(answer.get("tokens"), list):
            raise ConfigError(
                f"{self._url} has no /tokenize that gives `tokens`; leave out --exact"
            )
        ids: list[int] = answer["tokens"]
        return ids

    async def flush_cache(self) -> None:
        path = f"/flush_cache?wait={FLUSH_SECONDS}"
        if await asyncio.to_thread(self._call, path, {}) is None:
            raise ConfigError(f"{self._url} has no /flush_cache that obeys us; use --cache as-is")

    async def describe(self) -> dict[str, Any] | None:
        return await asyncio.to_thread(self._call, "/v1/engine/config")

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """GET without a body, POST with one; None unless the answer is a JSON object with status 200."""
        data = None if body is None else orjson.dumps(body)
        request = urllib.request.Request(self._url + path, data)
        request.add_header("Content-Type", "application/json")
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with urllib.request.urlopen(request, timeout=2 * FLUSH_SECONDS) as answer:
                found = orjson.loads(answer.read())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

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
