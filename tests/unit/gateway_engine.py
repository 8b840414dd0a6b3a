"""A scripted engine in memory, and ways to call the gateway over it without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import httpx
import orjson

from srt.gateway import GatewaySettings, create_app
from srt.wire.messages import Detokenized, Generate, Output, Tokenized, Welcome
from srt.wire.params import (
    CacheReport,
    ChatMessage,
    ChatOptions,
    Finish,
    LogprobEntry,
    Timing,
    TokenLogprobs,
    Usage,
)

VOCAB = 512
Item = Output | Exception | asyncio.Event
Script = Callable[[Generate], Sequence[Item]]


def finish(reason: str = "stop", **fields: Any) -> Finish:
    fields.setdefault("usage", Usage(prompt_tokens=7, completion_tokens=2, cached_tokens=4))
    fields.setdefault("timing", Timing(queue=0.5, prefill=0.25, decode=1.0))
    fields.setdefault("cache", CacheReport(matched_tokens=4, position=4, reason="diverged", ours=9))
    return Finish(reason=reason, **fields)  # type: ignore[arg-type]


def logprob(token: int, data: bytes, value: float = -0.5) -> TokenLogprobs:
    chosen = LogprobEntry(token=token, logprob=value, bytes=data)
    other = LogprobEntry(token=token + 1, logprob=float("-inf"), bytes=b"zz")
    return TokenLogprobs(chosen=chosen, top=[chosen, other])


def accepted(ask: Generate) -> Output:
    ids = ask.token_ids or [1, 2, 3, 4, 5, 6, 7]
    prompt = ask.prompt if ask.prompt is not None else "ids"
    echo = {"prompt_text": prompt, "prompt_token_ids": ids} if ask.echo else {}
    return Output(rid=ask.rid, accepted=True, prompt_tokens=7, **echo)  # type: ignore[arg-type]


def hello(ask: Generate) -> list[Item]:
    """`Hello` in two tokens for every sample, one after the other."""
    items: list[Item] = [accepted(ask)]
    for text, token in (("Hel", 10), ("lo", 11)):
        for index in range(ask.n):
            logprobs = None
            if ask.params.logprobs is not None:
                logprobs = [logprob(token, text.encode())]
            items.append(
                Output(rid=ask.rid, index=index, text=text, token_ids=[token], logprobs=logprobs)
            )
    items += [Output(rid=ask.rid, index=index, finish=finish()) for index in range(ask.n)]
    return items


class ScriptedEngine:
    """Plays `script(request)`: outputs are sent, exceptions raised, events waited for."""

    def __init__(self, script: Script = hello, **welcome: Any) -> None:
        self.script = script
        self.asked: list[Generate] = []
        self.aborted: list[str | None] = []
        self.closed: list[str] = []  # requests whose stream was left before its end
        self.tokenized: list[dict[str, Any]] = []
        self.health_body: dict[str, Any] = {"engine_age": 0.1, "phase": "ready"}
        self.failure: Exception | None = None
        self.is_stuck = False  # no question is answered
        self.snapshot: dict[str, Any] = {}
        facts = {
            "rid": "w",
            "version": 1,
            "model": "org/tiny",
            "context_length": 128,
            "vocab_size": VOCAB,
            "has_chat_template": True,
            "engine_id": "e1",
            "config_hash": "0123456789abcdef0123",
        }
        self.welcome = Welcome(**{**facts, **welcome})

    async def stream_request(self, request: Generate) -> AsyncGenerator[Output, None]:
        self.asked.append(request)
        left = request.n
        try:
            for item in self.script(request):
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, Exception):
                    left = 0
                    raise item
                else:
                    left -= item.finish is not None
                    yield item
        finally:
            if left:
                self.closed.append(request.rid)

    async def abort(self, rid: str | None = None) -> None:
        self.aborted.append(rid)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        chat: ChatOptions | None = None,
        add_special_tokens: bool = True,
    ) -> Tokenized:
        self.tokenized.append(
            {"prompt": prompt, "messages": messages, "special": add_special_tokens}
        )
        return Tokenized(rid="t", token_ids=[5, 6], tokens=[b"a", b"\xf0\x9f"], prompt="ab")

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> Detokenized:
        return Detokenized(rid="d", text="<s>" if list(token_ids) == [1] else f"{len(token_ids)}")

    async def health(self, timeout: float | None = None) -> dict[str, Any]:
        return await self._answer(self.health_body)

    async def metrics(self) -> dict[str, Any]:
        return await self._answer(self.snapshot)

    async def engine_config(self) -> dict[str, Any]:
        return await self._answer({"schedule": {"page_size": 16}})

    async def requests(self) -> dict[str, Any]:
        return await self._answer({"running": 0, "waiting": 0, "requests": []})

    async def request(self, rid: str) -> dict[str, Any]:
        return await self._answer({"requests": [{"rid": rid, "waits_for": {"reason": "pages"}}]})

    async def flush_cache(self, wait: float = 0.0) -> dict[str, Any]:
        return await self._answer({"freed_pages": 3, "waited": wait})

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.is_stuck:
            await asyncio.Event().wait()
        if self.failure is not None:
            raise self.failure
        return body


class Api:
    """The gateway over a scripted engine, called in this process."""

    def __init__(self, engine: ScriptedEngine | None = None, **settings: Any) -> None:
        self.engine = engine or ScriptedEngine()
        self.app = create_app(self.engine, GatewaySettings(**settings))
        self.gateway = self.app.state.gateway
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app), base_url="http://test"
        )

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.http.get(path, **options)

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": "hi", **fields})


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; `[DONE]` stays a string. Comments are left out."""
    found = []
    for block in response.text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else orjson.loads(data))
        else:
            assert not block or block.startswith(":"), block
    return found


class Caller:
    """One ASGI call by hand: can hang up, and can be slow to read."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        self.reads = asyncio.Event()  # cleared: the socket takes nothing
        self.reads.set()
        self._gone = asyncio.Event()
        self._body: bytes | None = orjson.dumps(body)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def hang_up(self) -> None:
        self._gone.set()

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        self.sent.append(message)
