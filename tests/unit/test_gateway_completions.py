"""Completions and the native endpoint: prompt forms, order of choices, echo, logprobs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_engine import Api, Item, ScriptedEngine, accepted, events, finish, hello, logprob

from srt.errors import QueueFull
from srt.wire.messages import Generate, Output


def steady(body: dict[str, Any]) -> dict[str, Any]:
    assert body["id"].startswith("cmpl-") and isinstance(body["created"], int)
    return {key: value for key, value in body.items() if key not in ("id", "created")}


def chunk(text: str, reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return {
        "object": "text_completion",
        "model": "org/tiny",
        "system_fingerprint": "fp_0123456789abcdef",
        "choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": reason}],
    }


async def test_whole_answer_and_stream() -> None:
    api = Api()
    whole = steady((await api.complete()).json())
    usage = whole.pop("usage")
    assert whole == chunk("Hello", "stop") and usage["total_tokens"] == 9
    *chunks, done = events(await api.complete(stream=True))
    assert done == "[DONE]"
    assert [steady(body) for body in chunks] == [chunk("Hel"), chunk("lo"), chunk("", "stop")]
    assert api.engine.asked[0].params.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("one", [("one", None)]),
        (["one", "two"], [("one", None), ("two", None)]),
        ([1, 2], [(None, [1, 2])]),
        ([[1], [2, 3]], [(None, [1]), (None, [2, 3])]),
        ("", [("", None)]),
    ],
)
async def test_prompt_forms(prompt: Any, asked: Any) -> None:
    api = Api()
    response = await api.complete(prompt=prompt)
    assert response.status_code == 200
    assert [(ask.prompt, ask.token_ids) for ask in api.engine.asked] == asked
    assert response.json()["usage"]["prompt_tokens"] == 7 * len(asked)


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [["x"]], ["x", 1], [1, "x"], [[1], []], [[1], 2], 3, {}, True, [512], [-1], [1.5]],
)
async def test_prompts_that_are_none(prompt: Any) -> None:
    api = Api()
    response = await api.complete(prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")
    assert not api.engine.asked


async def test_choices_come_prompt_by_prompt() -> None:
    def script(ask: Generate) -> list[Item]:
        items: list[Item] = [accepted(ask)]
        for index in range(ask.n):
            text = f"{ask.prompt}{index}"
            items.append(
                Output(rid=ask.rid, index=index, text=text, token_ids=[1], finish=finish())
            )
        return items

    api = Api(ScriptedEngine(script))
    whole = (await api.complete(prompt=["a", "b", "c"], n=2)).json()
    texts = [(choice["index"], choice["text"]) for choice in whole["choices"]]
    assert texts == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1"), (4, "c0"), (5, "c1")]
    assert whole["usage"]["prompt_tokens"] == 21 and whole["usage"]["completion_tokens"] == 12
    found: dict[int, str] = {}
    for body in events(await api.complete(prompt=["a", "b", "c"], n=2, stream=True))[:-1]:
        choice = body["choices"][0]
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    assert found == dict(texts)
    assert len({ask.rid for ask in api.engine.asked}) == 6


async def test_one_refused_prompt_refuses_all_and_aborts_the_rest() -> None:
    def script(ask: Generate) -> list[Item]:
        return [QueueFull("full")] if ask.prompt == "b" else [accepted(ask), asyncio.Event()]

    api = Api(ScriptedEngine(script))
    response = await api.complete(prompt=["a", "b"], stream=True)
    assert response.status_code == 429
    assert api.engine.closed == [api.engine.asked[0].rid] and not api.gateway.live


def scored(ask: Generate) -> list[Item]:
    """A prompt `hi`, whose first token is a start token that the text does not show."""
    prompt = [None, logprob(104, b"h", -1.0), logprob(105, b"i", -2.0)]
    first = Output(rid=ask.rid, accepted=True, prompt_tokens=3, prompt_text="hi")
    first.prompt_token_ids = [1, 104, 105]
    if ask.params.max_tokens == 0:
        return [first, Output(rid=ask.rid, prompt_logprobs=prompt, finish=finish("length"))]
    return [
        first,
        Output(
            rid=ask.rid,
            text="!",
            token_ids=[33],
            logprobs=[logprob(33, b"!")],
            prompt_logprobs=prompt,
        ),
        Output(rid=ask.rid, finish=finish("length")),
    ]


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_with_logprobs_scores_the_prompt(max_tokens: int) -> None:
    api = Api(ScriptedEngine(scored))
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    choice = (await api.complete(**fields)).json()["choices"][0]
    assert choice["text"] == "hi" + "!" * max_tokens
    table = choice["logprobs"]
    assert table["tokens"] == ["<s>", "h", "i", *"!" * max_tokens]
    assert table["token_logprobs"] == [None, -1.0, -2.0, *[-0.5] * max_tokens]
    assert table["top_logprobs"][:2] == [None, {"zz": -9999.0, "h": -1.0}]
    assert table["text_offset"] == [0, 0, 1, *[2] * max_tokens]
    params = api.engine.asked[0].params
    assert (params.logprobs, params.prompt_logprobs, params.max_tokens) == (1, 1, max_tokens)

    chunks = events(await api.complete(**fields, stream=True))[:-1]
    parts = [body["choices"][0] for body in chunks]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, values in table.items():
        assert [v for part in parts if part["logprobs"] for v in part["logprobs"][name]] == values


async def test_echo_without_logprobs_and_with_samples() -> None:
    api = Api()
    whole = (await api.complete(echo=True, n=2)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["hiHello", "hiHello"]
    assert api.engine.asked[0].params.prompt_logprobs is None
    chunks = events(await api.complete(echo=True, n=2, stream=True))[:-1]
    for index in (0, 1):
        mine = [body["choices"][0] for body in chunks if body["choices"][0]["index"] == index]
        assert [part["text"] for part in mine] == ["hi", "Hel", "lo", ""]


def ranked(ask: Generate) -> list[Item]:
    """Sample 0 has no token, sample 1 is unlikely, 2 and 3 are alike, 4 is long and likely."""
    items: list[Item] = [accepted(ask)]
    values = [[], [-3.0], [-1.0, -1.0], [-1.0], [-0.5] * 4, [-float("inf")]]
    for index, each in enumerate(values[: ask.n]):
        entries = [logprob(10, b"x", value) for value in each] if ask.params.logprobs == 0 else None
        items.append(
            Output(
                rid=ask.rid,
                index=index,
                text=f"s{index}",
                token_ids=[10] * len(each),
                logprobs=entries,
                finish=finish(),
            )
        )
    return items


async def test_best_of_keeps_the_likeliest_samples() -> None:
    api = Api(ScriptedEngine(ranked))
    response = await api.complete(prompt=["a", "b"], n=3, best_of=6, tandem={"token_ids": True})
    body = response.json()
    assert [choice["text"] for choice in body["choices"]] == ["s4", "s2", "s3"] * 2
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["logprobs"] for choice in body["choices"]] == [None] * 6
    assert [choice["token_ids"] for choice in body["tandem"]["choices"]][0] == [10] * 4
    assert body["usage"]["completion_tokens"] == 2 * 12 and body["usage"]["prompt_tokens"] == 14
    assert [(ask.n, ask.params.logprobs) for ask in api.engine.asked] == [(6, 0)] * 2


async def test_best_of_n_ranks_nothing() -> None:
    for best_of in (None, 2):
        api = Api()
        texts = (await api.complete(n=2, best_of=best_of, stream=True)).text
        assert "Hel" in texts and api.engine.asked[0].params.logprobs is None


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "best_of": 2},
        {"best_of": 2, "stream": True},
        {"best_of": 17},
        {"best_of": 0},
        {"best_of": True},
    ],
)
async def test_best_of_is_refused_by_name(fields: dict[str, Any]) -> None:
    response = await Api().complete(**fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == "best_of"


async def test_native_answers_hold_everything() -> None:
    api = Api()
    whole = (await api.post("/generate", {"token_ids": [1, 2], "logprobs": 1})).json()
    choice = whole["choices"][0]
    assert choice["token_ids"] == [10, 11] and choice["text"] == "Hello"
    assert choice["finish_reason"] == "stop" and choice["timings"]["queue"] == 0.5
    assert choice["logprobs"][0]["id"] == 10 and choice["cache"]["reason"] == "diverged"
    *parts, usage, done = events(await api.post("/generate", {"prompt": "x", "stream": True}))
    assert "".join(part["text"] for part in parts) == "Hello" and done == "[DONE]"
    assert [token for part in parts for token in part["token_ids"]] == [10, 11]
    assert parts[-1]["finish_reason"] == "stop" and usage["usage"] == whole["usage"]


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "x", "token_ids": [1]}, {"token_ids": []}, {"prompt": ["x"]}, {"messages": []}],
)
async def test_native_wants_exactly_one_input(body: dict[str, Any]) -> None:
    assert (await Api().post("/generate", body)).status_code == 400


async def test_a_live_request_id_may_not_be_used_twice() -> None:
    api = Api(ScriptedEngine(hello))
    api.gateway.live.enter("dup", ["dup"])
    response = await api.complete(request_id="dup")
    assert response.status_code == 409 and response.headers["x-should-retry"] == "false"
    api.gateway.live.leave("dup")
    response = await api.complete(request_id="dup")
    assert response.json()["id"] == "cmpl-dup" and api.engine.asked[0].rid == "dup"
    assert not api.gateway.live
