"""What the gateway asks of the engine. `srt.client.AsyncClient` is one; tests bring a scripted one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from srt.wire.messages import Detokenized, Generate, Output, Tokenized, Welcome
from srt.wire.params import ChatMessage, ChatOptions


class Engine(Protocol):
    """Every method raises a `TandemError`; none blocks for ever."""

    welcome: Welcome

    def stream_request(self, request: Generate) -> AsyncGenerator[Output, None]:
        """The first item has `accepted` (or an error is raised instead of it), the last of each
        sample has `finish`. Closing or cancelling it aborts the request. A failure is raised."""
        ...

    async def abort(self, rid: str | None = None) -> None: ...

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage] | None = None,
        chat: ChatOptions | None = None,
        add_special_tokens: bool = True,
    ) -> Tokenized: ...

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> Detokenized: ...

    async def health(self, timeout: float | None = None) -> dict[str, Any]: ...

    async def metrics(self) -> dict[str, Any]: ...

    async def engine_config(self) -> dict[str, Any]: ...

    async def requests(self) -> dict[str, Any]: ...

    async def request(self, rid: str) -> dict[str, Any]: ...

    async def flush_cache(self, wait: float = 0.0) -> dict[str, Any]: ...
