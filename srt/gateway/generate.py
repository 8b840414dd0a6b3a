"""POST /generate: the engine's own shape. Token ids and all figures are always there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from srt.gateway.checks import Bounds, as_text, as_token_ids, pick_one, refuse
from srt.gateway.choice import Choice, cache, count_usage, timings
from srt.gateway.logprobs import native_logprobs
from srt.gateway.parse import Call, Parsed, read_conversation, read_sampling, read_service
from srt.wire.messages import Generate, Output


def read_call(
    parsed: Parsed, bounds: Bounds, model: str, request_id: str, tenant: str, has_template: bool
) -> Call:
    """Raises InvalidRequest naming the field."""
    get = parsed.get
    settings = bounds.settings
    ask = Generate(
        rid=request_id,
        params=read_sampling(
            parsed,
            settings.defaults,
            max_tokens=get("max_tokens"),
            logprobs=get("logprobs"),
            prompt_logprobs=get("prompt_logprobs"),
        ),
        detokenize=get("detokenize", True),
        tenant=tenant,
        **_read_input(parsed, bounds, has_template),
        **read_service(parsed, settings.default_deadline),
    )
    return Call(
        request_id=request_id,
        model=model,
        asks=[ask],
        n=ask.n,
        stream=ask.stream,
        logprobs=ask.params.logprobs,
        ignored=parsed.ignored,
    )


def _read_input(parsed: Parsed, bounds: Bounds, has_template: bool) -> dict[str, Any]:
    given = pick_one(parsed.values, ("prompt", "token_ids", "messages"))
    if given == "messages":
        return read_conversation(parsed, bounds, has_template)
    if given == "prompt":
        return {"prompt": as_text("prompt", parsed.get("prompt"))}
    ids = as_token_ids("token_ids", parsed.get("token_ids"), bounds)
    if not ids:
        refuse("token_ids", "must not be empty")
    return {"token_ids": ids}


class GenerateShape:
    """Each event holds what is new of one choice; the last one of a choice has its reason, and the
    last one of all the usage."""

    def __init__(self, call: Call, created: int, fingerprint: str) -> None:
        self._call = call
        self._head: dict[str, Any] = {
            "id": call.request_id,
            "object": "generation.event" if call.stream else "generation",
            "created": created,
            "model": call.model,
            "config_hash": fingerprint,
        }

    def opening(self, choice: Choice) -> Iterator[dict[str, Any]]:
        return iter(())

    def pieces(self, choice: Choice, item: Output) -> Iterator[dict[str, Any]]:
        has_news = item.text or item.token_ids or item.finish or item.prompt_logprobs
        if not has_news:
            return
        body: dict[str, Any] = {
            **self._head,
            "index": choice.index,
            "text": item.text,
            "token_ids": item.token_ids,
            "finish_reason": choice.reason,
        }
        if item.logprobs is not None:
            body["logprobs"] = native_logprobs(list(item.logprobs))
        if item.prompt_logprobs is not None:
            body["prompt_logprobs"] = native_logprobs(item.prompt_logprobs)
        if item.finish is not None:
            body.update(_ending(choice))
        yield body

    def closing(self, choices: list[Choice]) -> Iterator[dict[str, Any]]:
        yield {**self._head, "usage": count_usage(choices, self._call.n)}

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._whole(choice) for choice in choices],
            "usage": count_usage(choices, self._call.n),
        }

    def _whole(self, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": choice.index,
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.reason,
            **_ending(choice),
        }
        if self._call.logprobs is not None:
            body["logprobs"] = native_logprobs(list(choice.logprobs))
        if choice.prompt.logprobs is not None:
            body["prompt_logprobs"] = native_logprobs(choice.prompt.logprobs)
        return body


def _ending(choice: Choice) -> dict[str, Any]:
    finish = choice.finish
    if finish is None:
        return {}
    return {"matched_stop": finish.matched, "timings": timings(finish), "cache": cache(finish)}
