"""Every field of a request: what is taken, what is refused, and that the refusal names it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from wire_examples import values

from srt.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    InvalidSchema,
    RequestError,
    RequestTooLarge,
)
from srt.wire.limits import Limits, check, check_length
from srt.wire.messages import Generate
from srt.wire.params import ChatMessage, Grammar, SamplingParams

VOCAB = 100
CONTEXT = 50
LIMITS = Limits(
    max_prompt_chars=200, max_stop=4, max_stop_chars=16, max_logit_bias=3, max_grammar_chars=20
)
NAN, INF = math.nan, math.inf

NUMBERS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0.0, 1e-6, 2.0], [-0.1, 2.1, NAN, INF, -INF]),
    "top_p": ([1e-9, 1.0], [0.0, -1.0, 1.01, NAN, INF]),
    "top_k": ([0, 1, 10**6], [-1, -2, 2**31]),
    "min_p": ([0.0, 1.0], [-0.01, 1.01, NAN]),
    "repetition_penalty": ([0.01, 10.0], [0.0, -1.0, 10.1, NAN, INF]),
    "presence_penalty": ([-2.0, 2.0], [-2.1, 2.1, NAN]),
    "frequency_penalty": ([-2.0, 2.0], [-2.1, 2.1, NAN, -INF]),
    "seed": ([None, 0, -(2**63), 2**63 - 1], [2**63, 2**64 - 1, -(2**63) - 1]),
    "max_tokens": ([None, 0, 1, 45], [-1, -(2**63)]),
    "min_tokens": ([0, 45], [-1, 47, 2**64 - 1]),
    "logprobs": ([None, 0, 20], [-1, 21]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21]),
    "stop": ([[], ["a"], ["\U0001f9ed"] * 4], [[""], ["a", ""], ["x" * 17], ["a"] * 5]),
    "stop_regex": ([[], ["a+"]], [[""], ["a", ""], ["x" * 17], ["a"] * 5]),
    "stop_token_ids": ([[], [0, 99]], [[100], [-1], [2**64 - 1], [1] * 1025]),
}
REQUEST_FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "rid": (["a", "x" * 256], ["", "x" * 257]),
    "n": ([1, 16], [0, -1, 17]),
    "priority": ([-5, 0, 10**6], [10**6 + 1, -(2**63)]),
    "deadline": ([None, 0.001, 1e9], [0.0, -1.0, NAN, INF]),
    "cache_salt": (["", "x" * 256], ["x" * 257]),
    "tenant": (["", "x"], ["x" * 257]),
}


def ask(params: dict[str, Any], **fields: Any) -> None:
    base: dict[str, Any] = {"rid": "r", "prompt": "hello"}
    check(Generate(**(base | fields), params=SamplingParams(**params)), LIMITS, VOCAB, CONTEXT, 4)


def cases(table: dict[str, tuple[list[Any], list[Any]]], side: int) -> list[tuple[str, Any]]:
    return [(name, value) for name, both in table.items() for value in both[side]]


@pytest.mark.parametrize(("name", "value"), cases(NUMBERS, 0))
def test_allowed_parameters(name: str, value: Any) -> None:
    ask({name: value})


@pytest.mark.parametrize(("name", "value"), cases(NUMBERS, 1))
def test_refused_parameters_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        ask({name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), cases(REQUEST_FIELDS, 0))
def test_allowed_fields(name: str, value: Any) -> None:
    ask({}, **{name: value})


@pytest.mark.parametrize(("name", "value"), cases(REQUEST_FIELDS, 1))
def test_refused_fields_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        ask({}, **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("kind", "param"),
    [
        ("json_schema", "response_format"), ("regex", "regex"), ("choice", "choice"),
        ("lark", "grammar"),
    ],
)  # fmt: skip
def test_grammars_have_a_size(kind: Any, param: str) -> None:
    for text in ("", "x" * (LIMITS.max_grammar_chars + 1)):
        with pytest.raises(InvalidSchema) as caught:
            ask({"grammar": Grammar(kind=kind, text=text)})
        assert caught.value.param == param
    ask({"grammar": Grammar(kind=kind, text="x" * LIMITS.max_grammar_chars)})
    ask({"grammar": Grammar(kind="json_object")})


def test_every_parameter_is_in_the_table() -> None:
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert fields - set(NUMBERS) == {
        "logit_bias", "ignore_eos", "grammar", "logprobs_mode",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ({-1: 1.0}, "logit_bias.-1"),
        ({VOCAB: 1.0}, f"logit_bias.{VOCAB}"),
        ({999_999_999: 1.0}, "logit_bias.999999999"),
        ({5: 1e9}, "logit_bias.5"),
        ({5: NAN}, "logit_bias.5"),
        ({5: -100.5}, "logit_bias.5"),
        ({1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}, "logit_bias"),
    ],
)
def test_bad_biases_are_named(bias: dict[int, float], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask({"logit_bias": bias})
    assert caught.value.param == param
    ask({"logit_bias": {VOCAB - 1: -100.0, 0: 100.0}})


def test_exactly_one_prompt() -> None:
    for fields in (
        {"prompt": None},
        {"token_ids": [1]},
        {"messages": [ChatMessage(role="user", content="a")]},
    ):
        with pytest.raises(InvalidRequest, match="exactly one"):
            ask({}, **fields)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([ChatMessage(role="", content="a")], "messages[0].role"),
        ([ChatMessage(role="user", content="a"), ChatMessage(role="user")], "messages[1].content"),
    ],
)
def test_bad_messages(messages: list[ChatMessage], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask({}, prompt=None, messages=messages)
    assert caught.value.param == param
    ask({}, prompt=None, messages=[ChatMessage(role="assistant")])


def test_long_texts() -> None:
    ask({}, prompt="x" * 200)
    with pytest.raises(RequestTooLarge, match="200") as caught:
        ask({}, prompt="x" * 201)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestTooLarge):
        ask({}, prompt=None, messages=[ChatMessage(role="user", content="x" * 101)] * 2)


def test_token_ids() -> None:
    ask({}, prompt=None, token_ids=[0, VOCAB - 1])
    for wrong in (-1, VOCAB, 2**64 - 1):
        with pytest.raises(InvalidRequest, match=str(wrong)) as caught:
            ask({}, prompt=None, token_ids=[1, wrong])
        assert caught.value.param == "token_ids"
    with pytest.raises(ContextLengthExceeded):
        check(Generate(rid="r", token_ids=[1] * 51), LIMITS, VOCAB, CONTEXT)


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequest, match="detokenize"):
        ask({"stop": ["a"]}, detokenize=False)
    with pytest.raises(InvalidRequest, match="stop_regex"):
        ask({"stop_regex": ["a"]}, detokenize=False)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "budget"),
    [(1, None, 49), (49, None, 1), (49, 1, 1), (50, 0, 0), (1, 49, 49), (10, 5, 5)],
)
def test_what_fits(prompt_len: int, max_tokens: int | None, budget: int) -> None:
    assert check_length(SamplingParams(max_tokens=max_tokens), prompt_len, CONTEXT) == budget


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "param"),
    [(50, None, "prompt"), (51, 0, "prompt"), (49, 2, "max_tokens"), (1, 50, "max_tokens")],
)
def test_what_does_not_fit_names_the_numbers(
    prompt_len: int, max_tokens: int | None, param: str
) -> None:
    words = rf"{prompt_len} tokens .*{CONTEXT} \(--context-length\)"
    with pytest.raises(ContextLengthExceeded, match=words) as caught:
        check_length(SamplingParams(max_tokens=max_tokens), prompt_len, CONTEXT)
    assert caught.value.param == param
    assert max_tokens is None or str(max_tokens) in caught.value.message
    # Frameworks look for these words and shorten the prompt, where that can help.
    helps = max_tokens is None or max_tokens < CONTEXT
    assert ("prompt is too long" in caught.value.message) == helps


def test_a_conversation_that_is_too_long_is_called_messages() -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        check_length(SamplingParams(), CONTEXT, CONTEXT, "messages")
    assert caught.value.param == "messages"


def test_an_empty_prompt_is_the_prompts_fault() -> None:
    with pytest.raises(InvalidRequest, match="empty") as caught:
        check_length(SamplingParams(), 0, CONTEXT)
    assert caught.value.param == "prompt"


def test_more_minimum_than_room() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        check_length(SamplingParams(min_tokens=11), 40, CONTEXT)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        ask({"min_tokens": 3, "max_tokens": 2})


@given(message=values(Generate))
@settings(max_examples=300, deadline=None)
def test_any_message_passes_or_is_refused(message: Generate) -> None:
    try:
        check(message, LIMITS, VOCAB, CONTEXT)
    except RequestError as error:
        assert error.param
