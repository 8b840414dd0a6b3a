"""One generating request from its parsed form to its last byte. The only place that opens engine
requests for callers, hence the only one that closes them."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from srt.errors import InternalError, TandemError
from srt.gateway.choice import Choice, Prompt
from srt.gateway.errors import error_body, json_response
from srt.gateway.feed import ClientGone, Feed, unless_gone
from srt.gateway.parse import Call, ignored_header
from srt.gateway.shape import Shape
from srt.gateway.sse import DONE, EventStream, event
from srt.gateway.state import Gateway
from srt.wire.messages import Output

logger = logging.getLogger(__name__)


class Exchange:
    def __init__(self, gateway: Gateway, call: Call, shape: Shape) -> None:
        self._gateway = gateway
        self._call = call
        self._shape = shape
        self._started = time.monotonic()
        self._feed = Feed(gateway.engine, call.asks)
        self._choices: list[Choice] = []
        self._is_closed = False

    async def run(self, request: Request) -> Response:
        """The answer. Refusals are raised before a byte of it is sent. Raises ClientGone."""
        call, gateway = self._call, self._gateway
        gateway.live.enter(call.request_id, [ask.rid for ask in call.asks])
        headers = ignored_header(call.ignored)
        try:
            await unless_gone(request.receive, self._open())
            if call.stream:
                return EventStream(
                    self._events(),
                    self._end_stream,
                    headers=headers,
                    ping_seconds=gateway.settings.ping_seconds,
                    buffer_bytes=gateway.settings.stream_buffer_bytes,
                )
            await unless_gone(request.receive, self._gather())
            response = json_response(self._shape.whole(self._choices), headers=headers)
        except BaseException as error:
            await self.close()
            if isinstance(error, ClientGone):
                self._note("gone")
            if isinstance(error, TandemError):
                raise gateway.seen_by_caller(error) from None
            raise
        await self.close()
        return response

    async def close(self) -> None:
        """Aborts what is unfinished and frees the name. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._gateway.live.leave(self._call.request_id)
            await self._feed.aclose()

    async def _open(self) -> None:
        call = self._call
        await self._feed.open()
        prompts = [await self._prompt(self._feed.accepted[i]) for i in range(len(call.asks))]
        self._choices = [
            Choice(index=place * call.n + sample, prompt=prompt)
            for place, prompt in enumerate(prompts)
            for sample in range(call.n)
        ]

    async def _prompt(self, accepted: Output) -> Prompt:
        prompt = Prompt(num_tokens=accepted.prompt_tokens)
        if self._call.echo:
            prompt.text = accepted.prompt_text or ""
            first = (accepted.prompt_token_ids or [])[:1]
            if first and self._call.logprobs is not None:
                found = await self._gateway.ask(self._gateway.engine.detokenize(first))
                prompt.first_token = found.text
        return prompt

    def _take(self, place: int, item: Output) -> Choice:
        choice = self._choices[place * self._call.n + item.index]
        if item.token_ids:
            self._gateway.has_answered = True
            self._gateway.num_tokens += len(item.token_ids)
        choice.take(item, keep=not self._call.stream)
        return choice

    async def _gather(self) -> None:
        async for place, item in self._feed:
            self._take(place, item)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The stream's events. An error is one of them, so that the caller learns of it."""
        has_begun = False
        try:
            for choice in self._choices:
                for body in self._shape.opening(choice):
                    yield event(body)
            async for place, item in self._feed:
                choice = self._take(place, item)
                if not has_begun and item.token_ids:
                    has_begun = True
                    waited = time.monotonic() - self._started
                    self._gateway.tally.observe("http_ttft_seconds", waited)
                for body in self._shape.pieces(choice, item):
                    yield event(body)
            for body in self._shape.closing(self._choices):
                yield event(body)
        except TandemError as error:
            yield event(error_body(self._gateway.seen_by_caller(error)))
        except Exception:
            logger.exception("request %s failed while streaming", self._call.request_id)
            yield event(error_body(InternalError("the gateway met an error of its own")))
        await self.close()  # first: whoever has read the end may use the name again
        yield DONE

    async def _end_stream(self, how: str) -> None:
        await self.close()
        self._note(how)

    def _note(self, how: str) -> None:
        if how == "gone":
            self._gateway.tally.add("http_disconnects_total")
            logger.info("request %s: the caller hung up; aborted", self._call.request_id)
        elif how == "slow":
            self._gateway.tally.add("http_slow_readers_total")
            logger.warning(
                "request %s: the caller reads too slowly, %d bytes wait; aborted",
                self._call.request_id,
                self._gateway.settings.stream_buffer_bytes,
            )
