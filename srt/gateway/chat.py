"""POST /v1/chat/completions: the request, and how its answer looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from srt.gateway.checks import Bounds, refuse
from srt.gateway.choice import Choice
from srt.gateway.envelope import Envelope
from srt.gateway.logprobs import chat_logprobs
from srt.gateway.parse import (
    Call,
    Parsed,
    read_conversation,
    read_sampling,
    read_service,
    read_stream_options,
)
from srt.wire.messages import Generate, Output


def read_call(
    parsed: Parsed, bounds: Bounds, model: str, request_id: str, tenant: str, has_template: bool
) -> Call:
    """Raises InvalidRequest naming the field."""
    get = parsed.get
    settings = bounds.settings
    if "messages" not in parsed.values:
        refuse("messages", "is missing")
    if "top_logprobs" in parsed.values and not get("logprobs", False):
        refuse("top_logprobs", "only allowed with logprobs: true")
    options = read_stream_options(parsed)
    logprobs = get("top_logprobs", 0) if get("logprobs", False) else None
    ask = Generate(
        rid=request_id,
        params=read_sampling(
            parsed,
            settings.defaults,
            max_tokens=get("max_completion_tokens", get("max_tokens")),
            logprobs=logprobs,
            prompt_logprobs=None,
        ),
        tenant=tenant,
        **read_conversation(parsed, bounds, has_template),
        **read_service(parsed, settings.default_deadline),
    )
    return Call(
        request_id=request_id,
        model=model,
        asks=[ask],
        n=ask.n,
        stream=ask.stream,
        include_usage=bool(options & {"include_usage", "continuous_usage_stats"}),
        continuous_usage="continuous_usage_stats" in options,
        logprobs=logprobs,
        reports=get("tandem", frozenset()),
        service_tier="default" if "service_tier" in parsed.values else None,
        ignored=parsed.ignored,
    )


class ChatShape:
    def __init__(self, call: Call, created: int, fingerprint: str) -> None:
        self._with_logprobs = call.logprobs is not None
        kind = "chat.completion.chunk" if call.stream else "chat.completion"
        self._envelope = Envelope(call, created, fingerprint, prefix="chatcmpl", kind=kind)

    def opening(self, choice: Choice) -> Iterator[dict[str, Any]]:
        yield self._envelope.chunk(choice, {"delta": {"role": "assistant", "content": ""}})

    def pieces(self, choice: Choice, item: Output) -> Iterator[dict[str, Any]]:
        if item.text or item.logprobs:
            logprobs = chat_logprobs(item.logprobs) if item.logprobs else None
            yield self._envelope.chunk(choice, {"delta": {"content": item.text}}, logprobs)
        if item.finish is not None:
            yield self._envelope.last_chunk(choice, {"delta": {}})

    def closing(self, choices: list[Choice]) -> Iterator[dict[str, Any]]:
        return self._envelope.closing(choices)

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return self._envelope.whole([self._whole(choice) for choice in choices], choices, choices)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs) if self._with_logprobs else None,
            "finish_reason": choice.reason,
        }
