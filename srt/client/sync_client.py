"""The blocking face of the client library: the same connection, driven by a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

from srt.client.async_client import DEFAULT, AsyncClient
from srt.client.generation import Generation
from srt.client.options import Options, Prompt, Turn, read_messages
from srt.errors import EngineDead
from srt.wire.channels import DealerEnd
from srt.wire.keys import ClientKeys
from srt.wire.messages import Detokenized, Output, Tokenized, Topic, Welcome
from srt.wire.params import ChatOptions, SamplingParams

T = TypeVar("T")


class Client:
    """Any number of threads may use one. Close it, or use it in a `with` statement."""

    def __init__(
        self, client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread
    ):
        self._client = client
        self._loop = loop
        self._thread = thread

    @classmethod
    def connect(
        cls,
        engine: str | DealerEnd,
        *,
        timeout: float = 10.0,
        stall_seconds: float = 20.0,
        buffer: int = 65536,
        name: str = "",
        keys: str | Path | ClientKeys | None = None,
    ) -> Client:
        """As `AsyncClient.connect`."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="tandem-client", daemon=True)
        thread.start()
        connecting = AsyncClient.connect(
            engine,
            timeout=timeout,
            stall_seconds=stall_seconds,
            buffer=buffer,
            name=name,
            keys=keys,
        )
        try:
            client = asyncio.run_coroutine_threadsafe(connecting, loop).result()
        except BaseException:
            _end(loop, thread)
            raise
        return cls(client, loop, thread)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exit: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts what is open and leaves. Idempotent."""
        if not self._loop.is_closed():
            self._wait(self._client.close())
            _end(self._loop, self._thread)

    @property
    def welcome(self) -> Welcome:
        """What the engine said of itself when this client connected."""
        return self._client.welcome

    def generate(
        self, prompt: Prompt, params: SamplingParams = DEFAULT, **options: Unpack[Options]
    ) -> Generation:
        """The whole answer. Raises what it failed with."""
        return self._wait(self._client.generate(prompt, params, **options))

    def stream(
        self, prompt: Prompt, params: SamplingParams = DEFAULT, **options: Unpack[Options]
    ) -> Iterator[Output]:
        """Pieces as they are made; leaving the iterator aborts."""
        outputs = self._client.stream(prompt, params, **options)

        async def advance() -> Output | None:
            return await anext(outputs, None)

        try:
            while (output := self._wait(advance())) is not None:
                yield output
        finally:
            if not self._loop.is_closed():
                self._wait(outputs.aclose())

    def chat(
        self, messages: Sequence[Turn], params: SamplingParams = DEFAULT, **options: Unpack[Options]
    ) -> Generation:
        """`generate` over a conversation, rendered by the model's template."""
        return self.generate(read_messages(messages), params, **options)

    def stream_chat(
        self, messages: Sequence[Turn], params: SamplingParams = DEFAULT, **options: Unpack[Options]
    ) -> Iterator[Output]:
        """`stream` over a conversation."""
        return self.stream(read_messages(messages), params, **options)

    def abort(self, rid: str | None = None) -> None:
        """Ends one request of this client, or all. Their streams end with the reason "abort"."""
        self._wait(self._client.abort(rid))

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Turn] | None = None,
        chat: ChatOptions | None = None,
        add_special_tokens: bool = True,
    ) -> Tokenized:
        """As `AsyncClient.tokenize`."""
        return self._wait(
            self._client.tokenize(
                prompt, messages=messages, chat=chat, add_special_tokens=add_special_tokens
            )
        )

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> Detokenized:
        """As `AsyncClient.detokenize`."""
        return self._wait(
            self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def ask(self, topic: Topic, argument: str = "", timeout: float | None = None) -> dict[str, Any]:
        """What the engine says about `topic`; EngineDead after `timeout` seconds."""
        return self._wait(self._client.ask(topic, argument, timeout))

    def flush_cache(self, wait: float = 0.0) -> dict[str, Any]:
        """Empties the prefix cache. Raises NotReady if requests still run after `wait` seconds."""
        return self._wait(self._client.flush_cache(wait))

    def engine_config(self) -> dict[str, Any]:
        """As `AsyncClient.engine_config`."""
        return self._wait(self._client.engine_config())

    def metrics(self) -> dict[str, Any]:
        """As `AsyncClient.metrics`."""
        return self._wait(self._client.metrics())

    def health(self, timeout: float | None = None) -> dict[str, Any]:
        """As `AsyncClient.health`."""
        return self._wait(self._client.health(timeout))

    def requests(self) -> dict[str, Any]:
        """As `AsyncClient.requests`."""
        return self._wait(self._client.requests())

    def request(self, rid: str) -> dict[str, Any]:
        """As `AsyncClient.request`."""
        return self._wait(self._client.request(rid))

    def audit(self) -> dict[str, Any]:
        """As `AsyncClient.audit`."""
        return self._wait(self._client.audit())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise EngineDead("this client was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interrupt while waiting must not leave the work behind
            raise


async def _cancel_rest() -> None:
    """What an interrupt left behind, connecting for example, gets to close what it had opened."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=5.0)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(_cancel_rest(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
