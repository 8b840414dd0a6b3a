"""What OpenAI's chat and text completions have around their choices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from srt.gateway.choice import Choice, count_usage, report
from srt.gateway.parse import Call


class Envelope:
    """`prefix`: of the answer's id; `kind`: its `object`."""

    def __init__(
        self, call: Call, created: int, fingerprint: str, *, prefix: str, kind: str
    ) -> None:
        self._call = call
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{call.request_id}",
            "object": kind,
            "created": created,
            "model": call.model,
            "system_fingerprint": fingerprint,
        }
        if call.service_tier:
            self._head["service_tier"] = call.service_tier

    def chunk(
        self, choice: Choice, content: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """`content`: what the choice brings, under its own name."""
        return self._chunk(choice, content, logprobs, None)

    def last_chunk(self, choice: Choice, content: dict[str, Any]) -> dict[str, Any]:
        """Of a choice that is finished."""
        found = self._chunk(choice, content, None, choice.reason)
        return {**found, **report([choice], self._call.reports)}

    def closing(self, choices: list[Choice]) -> Iterator[dict[str, Any]]:
        if self._call.include_usage:
            usage = count_usage(choices, self._call.n)
            yield {**self._head, "choices": [], "usage": usage}

    def whole(
        self, bodies: list[dict[str, Any]], kept: list[Choice], choices: list[Choice]
    ) -> dict[str, Any]:
        """`bodies` are those of the choices `kept`; usage counts all."""
        return {
            **self._head,
            "choices": bodies,
            "usage": count_usage(choices, self._call.n),
            **report(kept, self._call.reports),
        }

    def _chunk(
        self,
        choice: Choice,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: str | None,
    ) -> dict[str, Any]:
        outcome = {"logprobs": logprobs, "finish_reason": reason}
        body = {**self._head, "choices": [{"index": choice.index, **content, **outcome}]}
        if self._call.include_usage:
            body["usage"] = count_usage([choice], 1) if self._call.continuous_usage else None
        return body
