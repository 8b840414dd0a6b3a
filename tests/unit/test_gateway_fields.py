"""The field table is what the gateway does: served as it says, refused as it says."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from gateway_engine import VOCAB, Api

from srt.gateway.fields import FIELDS, PATHS, Endpoint, fields_of
from srt.wire.messages import Generate
from srt.wire.params import Grammar

INPUT: dict[Endpoint, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "generate": {"prompt": "hi"},
    "tokenize": {"prompt": "hi"},
    "detokenize": {"token_ids": [1]},
}
# What an exact field looks like, and where the engine must find it: (value, attribute, expected).
SERVED: dict[str, tuple[Any, str, Any]] = {
    "max_completion_tokens": (9, "params.max_tokens", 9),
    "max_tokens": (9, "params.max_tokens", 9),
    "min_tokens": (3, "params.min_tokens", 3),
    "stop": ("end", "params.stop", ["end"]),
    "stop_regex": ("a+", "params.stop_regex", ["a+"]),
    "stop_token_ids": ([4], "params.stop_token_ids", [4]),
    "include_stop_str_in_output": (True, "include_stop", True),
    "ignore_eos": (True, "params.ignore_eos", True),
    "temperature": (0.5, "params.temperature", 0.5),
    "top_p": (0.5, "params.top_p", 0.5),
    "top_k": (-1, "params.top_k", 0),
    "min_p": (0.5, "params.min_p", 0.5),
    "presence_penalty": (0.5, "params.presence_penalty", 0.5),
    "frequency_penalty": (-0.5, "params.frequency_penalty", -0.5),
    "repetition_penalty": (1.5, "params.repetition_penalty", 1.5),
    "logit_bias": ({"7": -100}, "params.logit_bias", {7: -100.0}),
    "seed": (-(2**63), "params.seed", -(2**63)),
    "n": (3, "n", 3),
    "stream": (True, "stream", True),
    "priority": (-2, "priority", -2),
    "deadline": (1.5, "deadline", 1.5),
    "cache_salt": ("s", "cache_salt", "s"),
    "request_id": ("r-1", "rid", "r-1"),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "add_special_tokens": (False, "add_special_tokens", False),
    "detokenize": (False, "detokenize", False),
    "response_format": ({"type": "json_object"}, "params.grammar", Grammar(kind="json_object")),
    "regex": ("a|b", "params.grammar", Grammar(kind="regex", text="a|b")),
    "choice": (["a", "b"], "params.grammar", Grammar(kind="choice", text='["a","b"]')),
    "grammar": ('start: "a"', "params.grammar", Grammar(kind="lark", text='start: "a"')),
    "echo": (True, "echo", True),
    "prompt_logprobs": (2, "params.prompt_logprobs", 2),
    "logprobs_mode": ("processed", "params.logprobs_mode", "processed"),
    "best_of": (3, "n", 3),
    "prompt": ("yo", "prompt", "yo"),
    "chat_template_kwargs": ({"a": 1}, "chat.template_kwargs", {"a": 1}),
    "add_generation_prompt": (False, "chat.add_generation_prompt", False),
}
# Fields that need company or whose effect is elsewhere have tests of their own.
ELSEWHERE = {
    "model", "messages", "token_ids", "logprobs", "top_logprobs", "stream_options", "tandem",
    "continue_final_message",
}  # fmt: skip
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
GENERATING: tuple[Endpoint, ...] = ("chat", "completions", "generate")


def rows(status: str) -> list[tuple[Endpoint, str]]:
    return [
        (endpoint, row.name)
        for endpoint in GENERATING
        for row in fields_of(endpoint).values()
        if row.status == status
    ]


def find(ask: Generate, path: str) -> Any:
    value: Any = ask
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_no_field_has_two_rows_at_one_endpoint() -> None:
    pairs = [(endpoint, row.name) for row in FIELDS for endpoint in row.endpoints]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize(("endpoint", "name"), rows("exact"))
async def test_exact_fields_reach_the_engine(endpoint: Endpoint, name: str) -> None:
    if name in ELSEWHERE:
        return
    value, path, expected = SERVED[name]
    body = INPUT[endpoint]
    if endpoint == "generate" and fields_of("chat").get(name) and path.startswith("chat."):
        body = INPUT["chat"]
    api = Api()
    response = await api.post(PATHS[endpoint], {**body, name: value})
    assert response.status_code == 200, response.text
    assert find(api.engine.asked[0], path) == expected
    assert "x-tandem-ignored" not in response.headers


@pytest.mark.parametrize(("endpoint", "name"), rows("exact"))
async def test_null_is_absent(endpoint: Endpoint, name: str) -> None:
    if name in INPUT[endpoint]:
        return
    plain, with_null = Api(), Api()
    await plain.post(PATHS[endpoint], {**INPUT[endpoint], "request_id": "same"})
    body = {**INPUT[endpoint], "request_id": "same", name: None}
    if name == "request_id":
        del body["request_id"]
    response = await with_null.post(PATHS[endpoint], body)
    assert response.status_code == 200
    if name != "request_id":
        assert with_null.engine.asked == plain.engine.asked


@pytest.mark.parametrize(("endpoint", "name"), rows("refused"))
async def test_refused_fields_are_refused_by_name(endpoint: Endpoint, name: str) -> None:
    api = Api()
    response = await api.post(PATHS[endpoint], {**INPUT[endpoint], name: {"x": 1}})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == name and name in error["message"]
    assert not api.engine.asked
    row = fields_of(endpoint)[name]
    assert row.note in error["message"]
    for free in (None, *row.neutral):
        response = await api.post(PATHS[endpoint], {**INPUT[endpoint], name: free})
        assert response.status_code == 200


@pytest.mark.parametrize(("endpoint", "name"), rows("ignored"))
async def test_ignored_fields_are_named(endpoint: Endpoint, name: str) -> None:
    for strict in (False, True):
        api = Api(strict_fields=strict)
        response = await api.post(PATHS[endpoint], {**INPUT[endpoint], name: "x"})
        assert response.status_code == 200 and response.headers["x-tandem-ignored"] == name
        tier = response.json().get("service_tier")
        assert tier == ("default" if name == "service_tier" else None)


@pytest.mark.parametrize("endpoint", PATHS)
async def test_unknown_fields_are_named_or_refused(endpoint: Endpoint) -> None:
    body = {**INPUT[endpoint], "zebra\r\nx: é": 1, "y": 2}
    response = await Api().post(PATHS[endpoint], body)
    assert response.status_code == 200
    assert response.headers["x-tandem-ignored"] == "zebra%0D%0Ax%3A%20%C3%A9, y"
    response = await Api(strict_fields=True).post(PATHS[endpoint], {**INPUT[endpoint], "zebra": 1})
    assert response.status_code == 400 and response.json()["error"]["param"] == "zebra"


NUMERIC = [
    (endpoint, row.name)
    for endpoint in GENERATING
    for row in fields_of(endpoint).values()
    if row.status == "exact" and row.rule.schema.get("type") in ("number", "integer")
]
VALUES = [b"true", b'"1"', b"NaN", b"Infinity", b"-Infinity", b"1e999", b"[]", b"{}"]
EDGES = [b"null", b"0", b"-1", b"1", b"1.5", b"1e9", b"1000000000", b"18446744073709551616"]


@pytest.mark.parametrize(("endpoint", "name"), NUMERIC)
async def test_numbers_are_served_or_refused(endpoint: Endpoint, name: str) -> None:
    api = Api()
    headers = {"content-type": "application/json"}
    for value in (*VALUES, *EDGES):
        body = orjson.dumps(INPUT[endpoint])[:-1] + b',"' + name.encode() + b'":' + value + b"}"
        response = await api.http.post(PATHS[endpoint], content=body, headers=headers)
        if response.status_code == 200:
            assert value in EDGES, value
        else:
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == name or "not JSON" in error["message"], (value, error)
    assert (await api.post(PATHS[endpoint], INPUT[endpoint])).status_code == 200


@pytest.mark.parametrize("key", ["-1", str(VOCAB), "999999999", "9" * 30, "seven", "1.5", "", "٣"])
async def test_bias_outside_the_vocabulary_names_the_key(key: str) -> None:
    response = await Api().chat(logit_bias={key: 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"logit_bias.{key}"


@pytest.mark.parametrize("bias", [1e9, None, True, "1", -100.5])
async def test_bias_values(bias: Any) -> None:
    response = await Api().chat(logit_bias={"7": bias})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logit_bias.7"
    assert (await Api().chat(logit_bias={str(VOCAB - 1): 100})).status_code == 200


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], "x" * 1025, ["x"] * 33, [1], 5, {}])
async def test_stops_that_cannot_be(stop: Any) -> None:
    response = await Api().chat(stop=stop)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("stop")


@pytest.mark.parametrize("stop", [None, [], "\n\n", ["🧭", "<<END>>"], ["x"] * 32])
async def test_stops_that_can(stop: Any) -> None:
    assert (await Api().chat(stop=stop)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [IMAGE]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 17}, "n"),
        ({"model": "other/model"}, "model"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a"),
        ({"request_id": "a b"}, "request_id"),
        ({"tandem": {"secrets": True}}, "tandem.secrets"),
    ],
)  # fmt: skip
async def test_chat_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    response = await Api().chat(**fields)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"seed": 10**22 + 7}, "from -9223372036854775808 to 9223372036854775807, not 1e+22"),
        ({"seed": True}, "9223372036854775807, not true"),
        ({"n": "two"}, 'must be an integer from 1 to 16, not "two"'),
        ({"n": 1e30}, "from 1 to 16 (--max-n), not 1e+30"),
        ({"temperature": True}, "not true"),
        ({"stop": {"a": None}}, 'not {"a": null}'),
        ({"messages": [{"role": None, "content": "x"}]}, "must be a string, not null"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "list of text parts, not null"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "[0].text: is missing"),
    ],
)
async def test_refusals_speak_json_and_say_the_range(fields: dict[str, Any], words: str) -> None:
    response = await Api().chat(**fields)
    assert response.status_code == 400 and words in response.json()["error"]["message"]


async def test_max_completion_tokens_wins() -> None:
    api = Api()
    await api.chat(max_completion_tokens=3, max_tokens=9)
    assert api.engine.asked[0].params.max_tokens == 3


async def test_capabilities_are_the_table() -> None:
    body = (await Api().get("/capabilities")).json()
    page = (await Api().get("/docs")).text
    for endpoint, path in PATHS.items():
        assert set(body["endpoints"][path]) == set(fields_of(endpoint))
        table = page.partition(f"<h2><code>POST {path}</code>")[2].partition("</table>")[0]
        for name, row in fields_of(endpoint).items():
            assert f"<td><code>{name}</code><td>{row.status}<td>" in table
    assert body["endpoints"]["/v1/chat/completions"]["tools"]["status"] == "refused"
