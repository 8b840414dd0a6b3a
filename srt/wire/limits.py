"""What a request may ask for. Every field of `Generate` is checked here, once, before anything else
sees it; every refusal names the field and the limit.

`check` needs no tokenizer: run it first. Give it the number of prompt tokens, or call `check_length`
later, for the limits that only tokens can tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from srt.errors import ContextLengthExceeded, InvalidRequest, InvalidSchema, RequestTooLarge
from srt.wire.messages import Generate
from srt.wire.params import ChatMessage, Grammar, SamplingParams

INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Configured ceilings; the flag of each is its name. Lengths of texts in characters, times in
    seconds."""

    max_prompt_chars: int = 4_000_000
    max_messages: int = 4096
    max_n: int = 16
    max_logprobs: int = 20
    max_stop: int = 32  # of strings, and again of patterns
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 1024
    max_grammar_chars: int = 65_536
    max_name_chars: int = 256  # rid, cache_salt, tenant
    max_priority: int = 1_000_000  # either side of 0; no flag, it is the vocabulary's
    default_deadline: float = 600.0


def check(
    message: Generate,
    limits: Limits,
    vocab_size: int,
    context_length: int,
    prompt_len: int | None = None,
) -> None:
    """Raises InvalidRequest (or RequestTooLarge for a text, ContextLengthExceeded for tokens).

    `prompt_len` is the number of prompt tokens, None while it is unknown.
    """
    check_rid(message.rid, limits)
    check_prompt(message.prompt, message.messages, limits, message.token_ids)
    if message.token_ids is not None:
        check_tokens("token_ids", message.token_ids, vocab_size)
        if prompt_len is None and len(message.token_ids) > context_length:
            _refuse_length(len(message.token_ids), message.params.max_tokens, context_length)
    check_sampling(message.params)
    _check_stops(message, limits, vocab_size)
    _check_bias(message.params, limits, vocab_size)
    _check_grammar(message.params.grammar, limits)
    _check_range("n", message.n, 1, limits.max_n, flag="--max-n")
    for name, value in (
        ("logprobs", message.params.logprobs),
        ("prompt_logprobs", message.params.prompt_logprobs),
    ):
        if value is not None:
            _check_range(name, value, 0, limits.max_logprobs, flag="--max-logprobs")
    _check_range("priority", message.priority, -limits.max_priority, limits.max_priority)
    if message.deadline is not None and not 0 < message.deadline < math.inf:
        raise InvalidRequest(
            f"deadline is {message.deadline}; it must be a positive number of seconds",
            param="deadline",
        )
    for name, text in (("cache_salt", message.cache_salt), ("tenant", message.tenant)):
        _check_chars(name, text, limits.max_name_chars, "--max-name-chars")
    if prompt_len is not None:
        check_length(message.params, prompt_len, context_length)


def check_rid(rid: str, limits: Limits) -> None:
    if not rid:
        raise InvalidRequest("rid is empty; every request needs a name", param="rid")
    _check_chars("rid", rid, limits.max_name_chars, "--max-name-chars")


def check_prompt(
    prompt: str | None,
    messages: Sequence[ChatMessage] | None,
    limits: Limits,
    token_ids: Sequence[int] | None = None,
) -> None:
    """Exactly one kind of prompt, not too long."""
    given = [
        name
        for name, value in (("prompt", prompt), ("token_ids", token_ids), ("messages", messages))
        if value is not None
    ]
    if len(given) != 1:
        raise InvalidRequest(
            f"exactly one of prompt, token_ids and messages must be set; got {given or 'none'}",
            param=given[1] if given else "prompt",
        )
    if messages is not None:
        _check_messages(messages, limits)
    num_chars = len(prompt or "") + sum(len(m.content or "") for m in messages or ())
    if num_chars > limits.max_prompt_chars:
        raise RequestTooLarge(
            f"the {given[0]} has {num_chars} characters; at most {limits.max_prompt_chars} are "
            "taken (--max-prompt-chars)",
            param=given[0],
        )


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Every id is in the vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"{name} holds {wrong}; the vocabulary's ids are 0 to {vocab_size - 1}", param=name
        )


def check_length(
    params: SamplingParams, prompt_len: int, context_length: int, field: str = "prompt"
) -> int:
    """The prompt and its output fit the context. Returns the largest number of output tokens: what
    was asked, or the rest of the context. `field`: where the prompt stands in the request."""
    if prompt_len == 0:
        raise InvalidRequest("the prompt is empty: it has no tokens", param=field)
    rest = context_length - prompt_len
    asked = params.max_tokens
    if rest < (1 if asked is None else asked):
        _refuse_length(prompt_len, asked, context_length, field)
    budget = rest if asked is None else asked
    if params.min_tokens > budget:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but at most {budget} tokens can come",
            param="min_tokens",
        )
    return budget


def _refuse_length(
    prompt_len: int, max_tokens: int | None, context_length: int, field: str = "prompt"
) -> None:
    # Client frameworks know an overflow, and shorten the prompt, by "prompt is too long" in the text: it
    # stands wherever that could help.
    room = context_length - prompt_len
    if max_tokens is not None and room > 0:
        cure = "lower it" if max_tokens >= context_length else "lower it, or the prompt is too long"
        raise ContextLengthExceeded(
            f"max_tokens is {max_tokens}, but a prompt of {prompt_len} tokens leaves room for {room} in "
            f"the context length of {context_length} (--context-length); {cure}",
            param="max_tokens",
        )
    asked = "at least 1 output token" if max_tokens is None else f"max_tokens {max_tokens}"
    raise ContextLengthExceeded(
        f"the prompt is too long: with {asked}, its {prompt_len} tokens are more than the context "
        f"length of {context_length} (--context-length)",
        param=field,
    )


def _check_messages(messages: Sequence[ChatMessage], limits: Limits) -> None:
    if not 1 <= len(messages) <= limits.max_messages:
        raise InvalidRequest(
            f"messages has {len(messages)} entries; it must have 1 to {limits.max_messages} "
            "(--max-messages)",
            param="messages",
        )
    for i, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"message {i} has an empty role", param=f"messages[{i}].role")
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(
                f"message {i} has no content; only an assistant's may be null",
                param=f"messages[{i}].content",
            )


def check_sampling(params: SamplingParams) -> None:
    """Every number in its range, as far as neither the model nor a flag has a say."""
    if params.max_tokens is not None and params.max_tokens < 0:
        raise InvalidRequest(
            f"max_tokens is {params.max_tokens}; it must be 0 or more", param="max_tokens"
        )
    if params.min_tokens < 0:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}; it must be 0 or more", param="min_tokens"
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, more than max_tokens, {params.max_tokens}",
            param="min_tokens",
        )
    _check_range("temperature", params.temperature, 0.0, 2.0)
    _check_range("top_p", params.top_p, 0.0, 1.0, above=True)
    _check_range("min_p", params.min_p, 0.0, 1.0)
    _check_range("repetition_penalty", params.repetition_penalty, 0.0, 10.0, above=True)
    _check_range("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _check_range("top_k", params.top_k, 0, 2**31 - 1)
    if params.seed is not None:
        _check_range("seed", params.seed, INT64[0], INT64[-1])


def _check_stops(message: Generate, limits: Limits, vocab_size: int) -> None:
    params = message.params
    for name, stops in (("stop", params.stop), ("stop_regex", params.stop_regex)):
        if len(stops) > limits.max_stop:
            raise InvalidRequest(
                f"{name} has {len(stops)} strings; at most {limits.max_stop} are taken (--max-stop)",
                param=name,
            )
        for stop in stops:
            if not stop:
                raise InvalidRequest(
                    f"{name} holds an empty string; it would match anywhere", param=name
                )
            _check_chars(name, stop, limits.max_stop_chars, "--max-stop-chars")
        if stops and not message.detokenize:
            raise InvalidRequest(
                f"{name} needs text, and detokenize is false; use stop_token_ids", param=name
            )
    if len(params.stop_token_ids) > limits.max_stop_token_ids:
        raise InvalidRequest(
            f"stop_token_ids has {len(params.stop_token_ids)} ids; "
            f"at most {limits.max_stop_token_ids} are taken (--max-stop-token-ids)",
            param="stop_token_ids",
        )
    check_tokens("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_bias(params: SamplingParams, limits: Limits, vocab_size: int) -> None:
    if len(params.logit_bias) > limits.max_logit_bias:
        raise InvalidRequest(
            f"logit_bias has {len(params.logit_bias)} entries; "
            f"at most {limits.max_logit_bias} are taken (--max-logit-bias)",
            param="logit_bias",
        )
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token}; the vocabulary's ids are 0 to {vocab_size - 1}",
                param=f"logit_bias.{token}",
            )
        _check_range(f"logit_bias.{token}", bias, -100.0, 100.0)


def _check_grammar(grammar: Grammar | None, limits: Limits) -> None:
    """Its size only; whether it can be served is for `srt.structured` to say."""
    if grammar is None:
        return
    if grammar.kind != "json_object" and not grammar.text:
        raise InvalidSchema(f"{grammar.field}: the {grammar.kind} is empty", param=grammar.field)
    if len(grammar.text) > limits.max_grammar_chars:
        raise InvalidSchema(
            f"{grammar.field}: the {grammar.kind} has {len(grammar.text)} characters; at most "
            f"{limits.max_grammar_chars} are taken (--max-grammar-chars)",
            param=grammar.field,
        )


def _check_range(
    name: str, value: float, low: float, high: float, above: bool = False, flag: str = ""
) -> None:
    """`above`: the lower limit itself is not allowed. NaN is in no range. `flag` sets the upper one."""
    if not (low < value if above else low <= value) or not value <= high:
        words = f"more than {low} and at most {high}" if above else f"{low} to {high}"
        words += f" ({flag})" if flag else ""
        raise InvalidRequest(f"{name} is {value}; it must be {words}", param=name)


def _check_chars(name: str, text: str, most: int, flag: str) -> None:
    if len(text) > most:
        raise InvalidRequest(
            f"{name} has {len(text)} characters; at most {most} are taken ({flag})", param=name
        )
