"""From a JSON object to what the engine is asked. All three generating endpoints end here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from srt.errors import InvalidRequest, ModelNotFound
from srt.gateway.checks import Bounds, refuse
from srt.gateway.fields import Endpoint, fields_of
from srt.gateway.settings import Defaults
from srt.gateway.transcript import read_messages
from srt.wire.messages import Generate
from srt.wire.params import ChatOptions, Grammar, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The checked fields of one body: only those given and not null."""

    values: dict[str, Any]
    ignored: list[str]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


@dataclass(slots=True, kw_only=True)
class Call:
    """One generating request, understood. `asks` has one entry per prompt."""

    request_id: str
    model: str
    asks: list[Generate]
    n: int = 1
    num_kept: int | None = None  # of the n samples of a prompt, so many are returned; None: all
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    reports: frozenset[str] = frozenset()  # what the vendor key shall hold
    service_tier: str | None = None
    ignored: list[str] = field(default_factory=list)


def read_fields(endpoint: Endpoint, body: dict[str, Any], bounds: Bounds) -> Parsed:
    """Raises InvalidRequest naming the first field that cannot be served."""
    table = fields_of(endpoint)
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        if value is None:
            continue
        row = table.get(name)
        if row is None:
            if bounds.settings.strict_fields:
                refuse(name[:100], "unknown field, and this server is strict")
            ignored.append(name)
        elif row.status == "ignored":
            ignored.append(name)
            values[name] = value
        elif row.status == "exact":
            values[name] = row.rule.check(name, value, bounds)
        elif not any(type(value) is type(free) and value == free for free in row.neutral):
            refuse(name, f"not supported: {row.note}")
    return Parsed(values=values, ignored=ignored)


def ignored_header(names: list[str]) -> dict[str, str]:
    """Names may be any text the client chose, so they are quoted; a long list is cut."""
    if not names:
        return {}
    shown = ", ".join(quote(name[:64], safe="[].") for name in names[:32])
    return {"x-tandem-ignored": shown + (", ..." if len(names) > 32 else "")}


def check_model(parsed: Parsed, served: str) -> str:
    name: str = parsed.get("model", served)
    if name != served:
        raise ModelNotFound(
            f"model {name[:200]!r} is not served here; {served!r} is", param="model"
        )
    return name


def read_chat(parsed: Parsed) -> ChatOptions:
    going_on = bool(parsed.get("continue_final_message", False))
    starting = bool(parsed.get("add_generation_prompt", not going_on))
    if going_on and starting:
        refuse("continue_final_message", "cannot be combined with add_generation_prompt")
    return ChatOptions(
        add_generation_prompt=starting,
        continue_final_message=going_on,
        template_kwargs=parsed.get("chat_template_kwargs", {}),
    )


def read_conversation(parsed: Parsed, bounds: Bounds, has_template: bool) -> dict[str, Any]:
    """`messages` and how they become a prompt, as keywords of `Generate` and `Tokenize`."""
    chat = read_chat(parsed)
    messages = read_messages(parsed.get("messages"), parsed.ignored, bounds.settings.strict_fields)
    if not has_template:
        refuse("messages", "this model has no chat template; use /v1/completions")
    if chat.continue_final_message and messages[-1].role != "assistant":
        refuse("continue_final_message", "the last message must be the assistant's")
    return {"messages": messages, "chat": chat}


def read_sampling(
    parsed: Parsed,
    defaults: Defaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    get = parsed.get
    min_tokens = get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        refuse("min_tokens", f"{min_tokens} is more than the limit of {max_tokens} tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=get("temperature", defaults.temperature),
        top_k=max(0, get("top_k", defaults.top_k)),
        top_p=get("top_p", defaults.top_p),
        min_p=get("min_p", defaults.min_p),
        repetition_penalty=get("repetition_penalty", defaults.repetition_penalty),
        presence_penalty=get("presence_penalty", 0.0),
        frequency_penalty=get("frequency_penalty", 0.0),
        logit_bias=get("logit_bias", {}),
        seed=get("seed"),
        stop=get("stop", []),
        stop_regex=get("stop_regex", []),
        stop_token_ids=get("stop_token_ids", []),
        ignore_eos=get("ignore_eos", False),
        grammar=read_grammar(parsed),
        logprobs=logprobs,
        logprobs_mode=get("logprobs_mode", "raw"),
        prompt_logprobs=prompt_logprobs,
    )


def read_grammar(parsed: Parsed) -> Grammar | None:
    names = ("response_format", "regex", "choice", "grammar")
    given = [name for name in names if parsed.get(name) is not None]
    if len(given) > 1:
        refuse(given[1], f"cannot be combined with {given[0]}: an output has one form")
    return parsed.get(given[0]) if given else None


def read_service(parsed: Parsed, default_deadline: float | None) -> dict[str, Any]:
    """Fields that mean the same at every generating endpoint, as keywords of `Generate`."""
    get = parsed.get
    return {
        "n": get("n", 1),
        "stream": get("stream", False),
        "include_stop": get("include_stop_str_in_output", False),
        "skip_special_tokens": get("skip_special_tokens", True),
        "add_special_tokens": get("add_special_tokens", True),
        "priority": get("priority", 0),
        "deadline": get("deadline", default_deadline),
        "cache_salt": get("cache_salt", ""),
    }


def read_stream_options(parsed: Parsed) -> frozenset[str]:
    options: frozenset[str] = parsed.get("stream_options", frozenset())
    if "stream_options" in parsed.values and not parsed.get("stream", False):
        raise InvalidRequest(
            "stream_options: only allowed with stream: true", param="stream_options"
        )
    return options
