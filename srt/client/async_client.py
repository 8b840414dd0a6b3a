"""The asyncio face of the client library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar, Unpack

from srt.client.core import Core
from srt.client.generation import Generation
from srt.client.options import Options, Prompt, Turn, build_request, read_messages
from srt.errors import EngineDead, NotReady, ProtocolError
from srt.wire.channels import DealerEnd
from srt.wire.keys import ClientKeys, read_client_keys
from srt.wire.messages import (
    VERSION,
    Abort,
    Answer,
    Ask,
    Detokenize,
    Detokenized,
    FrontReply,
    FrontRequest,
    Generate,
    Hello,
    Output,
    Tokenize,
    Tokenized,
    Topic,
    Welcome,
)
from srt.wire.params import ChatOptions, SamplingParams
from srt.wire.sockets import Context, ZmqDealer, close_context, open_context

R = TypeVar("R", Answer, Detokenized, Tokenized, Welcome)
DEFAULT = SamplingParams()


class AsyncClient:
    """One connection, any number of requests at once, all in one event loop.

    Made by `connect`. Every call raises a leaf of `srt.errors.TandemError` and none waits for ever: a
    request fails with EngineDead when the engine falls silent.
    """

    def __init__(
        self, core: Core, welcome: Welcome, context: Context | None, timeout: float
    ) -> None:
        self._core = core
        self._context = context
        self._timeout = timeout
        self.welcome = welcome

    @classmethod
    async def connect(
        cls,
        engine: str | DealerEnd,
        *,
        timeout: float = 10.0,
        stall_seconds: float = 20.0,
        buffer: int = 65536,
        name: str = "",
        keys: str | Path | ClientKeys | None = None,
    ) -> AsyncClient:
        """`engine` is its front endpoint, or the end of a channel inside this process. `timeout`, in
        seconds, is for the welcome and every later question. `keys`: the file that the server's `tandem
        keys` made for this client, for a front that wants one. Raises NotReady, ProtocolError,
        ConfigError."""
        known = read_client_keys(keys) if isinstance(keys, (str, Path)) else keys
        context = open_context() if isinstance(engine, str) else None
        core = None
        try:
            if isinstance(engine, str):
                assert context is not None
                end: DealerEnd = ZmqDealer(context, engine, keys=known)
            else:
                end = engine
            core = Core(end, stall_seconds, buffer)
            hello = Hello(rid=core.name(), version=VERSION, client=name)
            welcome = _expect(Welcome, await core.call(hello, hello.rid, timeout))
            return cls(core, welcome, context, timeout)
        except BaseException as error:
            if core is not None:
                await core.close()
            if context is not None:
                await asyncio.to_thread(close_context, context)
            if isinstance(error, EngineDead):
                hint = "; or it does not know these keys"
                if known is None:
                    hint = "" if context is None else "; or it wants a key (keys=, --keys)"
                raise NotReady(f"no engine answers at {engine}: {error.message}{hint}") from None
            raise

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exit: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Aborts what is open and leaves. Idempotent."""
        await self._core.close()
        context, self._context = self._context, None
        if context is not None:
            await asyncio.to_thread(close_context, context)

    def declare_dead(self, role: str) -> None:
        """For a client that is told by other means that one of the engine's processes died."""
        self._core.declare_dead(f"the engine's {role} process died")

    # --- tokens --------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, params: SamplingParams = DEFAULT, **options: Unpack[Options]
    ) -> AsyncGenerator[Output, None]:
        """Pieces as they are made. Sent at the first `anext`; closing or cancelling it aborts. A sample
        that ends in an error raises it and aborts the others."""
        return self.stream_request(build_request(self._core.name(), prompt, params, True, options))

    async def stream_request(self, request: Generate) -> AsyncGenerator[Output, None]:
        """`stream` for a message that is already built."""
        box = self._core.open(request)
        try:
            while (item := await box.take()) is not None:
                yield item
        finally:
            self._core.leave(box)

    async def generate(
        self, prompt: Prompt, params: SamplingParams = DEFAULT, **options: Unpack[Options]
    ) -> Generation:
        """The whole answer."""
        request = build_request(self._core.name(), prompt, params, False, options)
        generation = Generation.empty(request.rid, request.n)
        async with aclosing(self.stream_request(request)) as outputs:
            async for output in outputs:
                generation.add(output)
        return generation

    async def chat(
        self, messages: Sequence[Turn], params: SamplingParams = DEFAULT, **options: Unpack[Options]
    ) -> Generation:
        """`generate` over a conversation, rendered by the model's template."""
        return await self.generate(read_messages(messages), params, **options)

    def stream_chat(
        self, messages: Sequence[Turn], params: SamplingParams = DEFAULT, **options: Unpack[Options]
    ) -> AsyncGenerator[Output, None]:
        """`stream` over a conversation, rendered by the model's template."""
        return self.stream(read_messages(messages), params, **options)

    async def abort(self, rid: str | None = None) -> None:
        """Ends one request of this client, or all. Their streams end with the reason "abort"."""
        self._core.send(Abort(rid=rid))

    # --- text ----------------------------------------------------------------------------------

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Turn] | None = None,
        chat: ChatOptions | None = None,
        add_special_tokens: bool = True,
    ) -> Tokenized:
        """The ids that `generate` would use for a text or a conversation (exactly one of the two), their
        bytes and the rendered text. Raises InvalidRequest."""
        request = Tokenize(
            rid=self._core.name(),
            prompt=prompt,
            messages=None if messages is None else read_messages(messages),
            chat=chat or ChatOptions(),
            add_special_tokens=add_special_tokens,
        )
        return _expect(Tokenized, await self._call(request, request.rid))

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> Detokenized:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD. Raises InvalidRequest for an id
        that the model does not have."""
        request = Detokenize(
            rid=self._core.name(),
            token_ids=list(token_ids),
            skip_special_tokens=skip_special_tokens,
        )
        return _expect(Detokenized, await self._call(request, request.rid))

    # --- questions -----------------------------------------------------------------------------

    async def ask(
        self, topic: Topic, argument: str = "", timeout: float | None = None
    ) -> dict[str, Any]:
        """What the engine says about `topic`."""
        request = Ask(rid=self._core.name(), topic=topic, argument=argument)
        return _expect(Answer, await self._call(request, request.rid, timeout)).body

    async def flush_cache(self, wait: float = 0.0) -> dict[str, Any]:
        """Empties the prefix cache; waits up to `wait` seconds for running requests to end."""
        return await self.ask("flush_cache", str(wait), self._timeout + wait)

    async def engine_config(self) -> dict[str, Any]:
        """Bags, runners, the trail of decisions and versions; see `srt.config.published.describe`."""
        return await self.ask("config")

    async def metrics(self) -> dict[str, Any]:
        """The scheduler's counters, gauges and histograms; see `Registry.snapshot`."""
        return await self.ask("metrics")

    async def health(self, timeout: float | None = None) -> dict[str, Any]:
        """`engine_age` (seconds), `phase` (starting, ready, stalled, draining), `live` (requests), and
        of an engine that is stalled the `cause`."""
        return await self.ask("health", timeout=timeout)

    async def requests(self) -> dict[str, Any]:
        """Everybody's live requests: counts, and per sample its state and why it waits."""
        return await self.ask("requests")

    async def request(self, rid: str) -> dict[str, Any]:
        """The live samples called `rid`, of any client; timing and cache too. Raises NotFound."""
        return await self.ask("request", rid)

    async def audit(self) -> dict[str, Any]:
        """`clean`, and one sentence for each invariant of the scheduler that is broken."""
        return await self.ask("audit")

    async def _call(
        self, request: FrontRequest, rid: str, timeout: float | None = None
    ) -> FrontReply:
        return await self._core.call(request, rid, self._timeout if timeout is None else timeout)


def _expect(kind: type[R], reply: FrontReply) -> R:
    if not isinstance(reply, kind):
        raise ProtocolError(f"{kind.__name__} was due and {type(reply).__name__} came")
    return reply
