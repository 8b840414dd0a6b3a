"""POST /v1/completions: four prompt forms, echo, and the older logprobs shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from srt.gateway.checks import Bounds, as_text, as_token_ids, refuse, show
from srt.gateway.choice import Choice, keep_best
from srt.gateway.envelope import Envelope
from srt.gateway.logprobs import TextLogprobs
from srt.gateway.parse import Call, Parsed, read_sampling, read_service, read_stream_options
from srt.wire.messages import Generate, Output

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def read_prompts(value: Any, bounds: Bounds) -> Sequence[str | list[int]]:
    """Each prompt as text or as token ids. Raises InvalidRequest naming the one at fault."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        refuse("prompt", f"must be a string, token ids, or a list of these, not {show(value)}")
    if not value:
        refuse("prompt", "must not be empty")
    if isinstance(value[0], (str, list)):
        most = bounds.settings.max_prompts
        if len(value) > most:
            refuse("prompt", f"has {len(value)} prompts; at most {most} are taken (--max-prompts)")
    if isinstance(value[0], str):
        return [as_text(f"prompt[{index}]", item) for index, item in enumerate(value)]
    if not isinstance(value[0], list):
        return [as_token_ids("prompt", value, bounds)]
    lists = [as_token_ids(f"prompt[{index}]", item, bounds) for index, item in enumerate(value)]
    for index, ids in enumerate(lists):
        if not ids:
            refuse(f"prompt[{index}]", "must not be empty")
    return lists


def read_call(parsed: Parsed, bounds: Bounds, model: str, request_id: str, tenant: str) -> Call:
    """Raises InvalidRequest naming the field."""
    get = parsed.get
    settings = bounds.settings
    if "prompt" not in parsed.values:
        refuse("prompt", "is missing")
    prompts = read_prompts(get("prompt"), bounds)
    options = read_stream_options(parsed)
    echo = get("echo", False)
    logprobs: int | None = get("logprobs")
    service = read_service(parsed, settings.default_deadline)
    num_kept = service["n"]
    service["n"] = _read_best_of(parsed, num_kept, service["stream"])
    params = read_sampling(
        parsed,
        settings.defaults,
        max_tokens=get("max_tokens", DEFAULT_MAX_TOKENS),
        logprobs=0 if logprobs is None and service["n"] > num_kept else logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    asks = [
        Generate(
            rid=request_id if len(prompts) == 1 else f"{request_id}.{index}",
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            params=params,
            echo=echo,
            tenant=tenant,
            **service,
        )
        for index, prompt in enumerate(prompts)
    ]
    return Call(
        request_id=request_id,
        model=model,
        asks=asks,
        n=service["n"],
        num_kept=num_kept,
        stream=service["stream"],
        include_usage=bool(options & {"include_usage", "continuous_usage_stats"}),
        continuous_usage="continuous_usage_stats" in options,
        echo=echo,
        logprobs=logprobs,
        reports=get("tandem", frozenset()),
        service_tier="default" if "service_tier" in parsed.values else None,
        ignored=parsed.ignored,
    )


def _read_best_of(parsed: Parsed, n: int, stream: bool) -> int:
    """How many samples of each prompt are made."""
    best_of: int = parsed.get("best_of", n)
    if best_of < n:
        refuse("best_of", f"must be at least n, which is {n}, not {best_of}")
    if best_of > n and stream:
        refuse(
            "best_of", "samples are ranked when all are complete: more than n cannot be streamed"
        )
    return best_of


class CompletionShape:
    def __init__(self, call: Call, created: int, fingerprint: str) -> None:
        self._call = call
        self._tables: dict[int, TextLogprobs] = {}
        self._envelope = Envelope(call, created, fingerprint, prefix="cmpl", kind="text_completion")

    def opening(self, choice: Choice) -> Iterator[dict[str, Any]]:
        return iter(())

    def pieces(self, choice: Choice, item: Output) -> Iterator[dict[str, Any]]:
        has_news = bool(item.text or item.token_ids or item.finish)
        if self._call.echo and has_news and not choice.has_echoed:
            # Not sooner: the prompt's logprobs come with its prefill.
            choice.has_echoed = True
            logprobs = self._prompt_logprobs(choice)
            yield self._envelope.chunk(choice, {"text": choice.prompt.text}, logprobs)
        if item.logprobs:
            table = self._table(choice)
            for entry in item.logprobs:
                table.add(entry)
            yield self._envelope.chunk(choice, {"text": item.text}, table.take())
        elif item.text:
            yield self._envelope.chunk(choice, {"text": item.text})
        if item.finish is not None:
            yield self._envelope.last_chunk(choice, {"text": ""})

    def closing(self, choices: list[Choice]) -> Iterator[dict[str, Any]]:
        return self._envelope.closing(choices)

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        kept, call = choices, self._call
        if call.num_kept is not None and call.num_kept < call.n:
            kept = keep_best(choices, call.n, call.num_kept)
        return self._envelope.whole([self._whole(choice) for choice in kept], kept, choices)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        echoed = choice.prompt.text if self._call.echo else ""
        logprobs = None
        if self._call.logprobs is not None:
            table = self._table(choice)
            self._add_prompt(choice, table)
            for entry in choice.logprobs:
                table.add(entry)
            logprobs = table.take()
        return {
            "index": choice.index,
            "text": echoed + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.reason,
        }

    def _table(self, choice: Choice) -> TextLogprobs:
        table = self._tables.get(choice.index)
        if table is None:
            table = self._tables[choice.index] = TextLogprobs()
        return table

    def _add_prompt(self, choice: Choice, table: TextLogprobs) -> None:
        prompt = choice.prompt
        if self._call.echo and prompt.logprobs is not None:
            table.add_prompt(prompt.text, prompt.first_token, prompt.logprobs)

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self._call.logprobs is None:
            return None
        table = self._table(choice)
        self._add_prompt(choice, table)
        return table.take()
