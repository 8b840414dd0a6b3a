"""Chat completions, stream and not: golden transcripts."""

from __future__ import annotations

from typing import Any

from gateway_engine import Api, Item, ScriptedEngine, accepted, events, finish, hello, logprob

from srt.errors import DeadlineExceeded, QueueFull
from srt.wire.messages import Generate, Output
from srt.wire.params import ChatMessage, Usage

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "total_tokens": 9,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def steady(body: dict[str, Any]) -> dict[str, Any]:
    """Without what changes from call to call, after looking at it."""
    assert body["id"].startswith("chatcmpl-") and isinstance(body["created"], int)
    return {key: value for key, value in body.items() if key not in ("id", "created")}


def chunk(delta: dict[str, Any], reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk",
        "model": "org/tiny",
        "system_fingerprint": "fp_0123456789abcdef",
        "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}],
    }


ROLE = {"role": "assistant", "content": ""}


async def test_whole_answer() -> None:
    response = await Api().chat(model="org/tiny")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert steady(response.json()) == {
        "object": "chat.completion",
        "model": "org/tiny",
        "system_fingerprint": "fp_0123456789abcdef",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


async def test_stream_is_role_text_reason_done() -> None:
    response = await Api().chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response)
    assert done == "[DONE]" and response.text.endswith("data: [DONE]\n\n")
    assert [steady(body) for body in chunks] == [
        chunk(ROLE),
        chunk({"content": "Hel"}),
        chunk({"content": "lo"}),
        chunk({}, "stop"),
    ]
    assert len({(body["id"], body["created"]) for body in chunks}) == 1


async def test_usage_is_null_until_its_own_chunk() -> None:
    *chunks, last, done = events(
        await Api().chat(stream=True, stream_options={"include_usage": True})
    )
    assert all(body["usage"] is None for body in chunks)
    assert last["choices"] == [] and last["usage"] == USAGE and done == "[DONE]"
    plain = events(await Api().chat(stream=True))
    assert not any("usage" in body for body in plain[:-1])


async def test_usage_grows_with_continuous_usage() -> None:
    options = {"continuous_usage_stats": True, "include_obfuscation": False}
    found = events(await Api().chat(stream=True, stream_options=options))
    counts = [body["usage"]["completion_tokens"] for body in found[:-1]]
    assert counts == [0, 1, 2, 2, 2]


async def test_two_samples_interleave_and_share_the_prompt() -> None:
    api = Api()
    options = {"include_usage": True}
    *chunks, usage, _ = events(await api.chat(stream=True, n=2, stream_options=options))
    assert [body["choices"][0]["index"] for body in chunks] == [0, 1] * 4
    for index in (0, 1):
        mine = [body["choices"][0] for body in chunks if body["choices"][0]["index"] == index]
        assert mine[0]["delta"] == ROLE and mine[-1]["finish_reason"] == "stop"
        assert "".join(body["delta"].get("content", "") for body in mine) == "Hello"
    whole = (await api.chat(n=2)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"] == usage["usage"] == {**USAGE, "completion_tokens": 4, "total_tokens": 11}


async def test_length_is_the_reason_when_the_limit_was_met() -> None:
    def script(ask: Generate) -> list[Item]:
        return [
            accepted(ask),
            Output(rid=ask.rid, text="x", token_ids=[1], finish=finish("length")),
        ]

    api = Api(ScriptedEngine(script))
    assert (await api.chat()).json()["choices"][0]["finish_reason"] == "length"
    chunks = events(await api.chat(stream=True))[:-1]
    assert [steady(body) for body in chunks] == [
        chunk(ROLE),
        chunk({"content": "x"}),
        chunk({}, "length"),
    ]


async def test_logprobs_have_true_bytes_and_no_infinity() -> None:
    def script(ask: Generate) -> list[Item]:
        halves = [logprob(40, b"\xf0\x9f"), logprob(41, b"\xa7\xad")]
        return [
            accepted(ask),
            Output(rid=ask.rid, token_ids=[40], logprobs=halves[:1]),
            Output(rid=ask.rid, text="🧭", token_ids=[41], logprobs=halves[1:]),
            Output(rid=ask.rid, finish=finish()),
        ]

    api = Api(ScriptedEngine(script))
    whole = (await api.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in whole["content"]) == "🧭".encode()
    assert whole["content"][0]["token"] == "bytes:\\xf0\\x9f" and whole["refusal"] is None
    assert whole["content"][0]["top_logprobs"][1]["logprob"] == -9999.0
    assert api.engine.asked[0].params.logprobs == 2
    chunks = events(await api.chat(logprobs=True, top_logprobs=2, stream=True))[:-1]
    streamed = [
        entry
        for body in chunks
        for entry in (body["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole["content"]


async def test_a_refusal_is_an_http_error_even_for_a_stream() -> None:
    def script(ask: Generate) -> list[Item]:
        return [QueueFull("1024 requests wait", retry_after=2.5)]

    for stream in (False, True):
        response = await Api(ScriptedEngine(script)).chat(stream=stream)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"
        assert response.json() == {
            "error": {
                "message": "1024 requests wait",
                "type": "rate_limit_error",
                "param": None,
                "code": "queue_full",
            }
        }


async def test_an_error_in_mid_stream_is_an_event() -> None:
    def script(ask: Generate) -> list[Item]:
        return [*hello(ask)[:2], DeadlineExceeded("1 s have passed")]

    found = events(await Api(ScriptedEngine(script)).chat(stream=True))
    assert steady(found[1]) == chunk({"content": "Hel"})
    error = {"message": "1 s have passed", "type": "server_error", "param": None, "code": "timeout"}
    assert found[2:] == [{"error": error}, "[DONE]"]
    whole = await Api(ScriptedEngine(script)).chat()
    assert whole.status_code == 408 and whole.headers["x-should-retry"] == "false"


async def test_an_abort_is_never_a_finish_reason() -> None:
    def script(ask: Generate) -> list[Item]:
        return [*hello(ask)[:2], Output(rid=ask.rid, finish=finish("abort"))]

    found = events(await Api(ScriptedEngine(script)).chat(stream=True))
    assert found[-2]["error"]["code"] == "aborted" and found[-1] == "[DONE]"
    assert all(body["choices"][0]["finish_reason"] is None for body in found[:-2])


async def test_a_fault_of_ours_tells_nothing_and_forbids_the_retry() -> None:
    def script(ask: Generate) -> list[Item]:
        return [*hello(ask)[:2], ValueError("secret")]

    response = await Api(ScriptedEngine(script)).chat()
    assert response.status_code == 500 and response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "internal" and "secret" not in response.text
    assert response.headers["x-request-id"] in response.text
    streamed = await Api(ScriptedEngine(script)).chat(stream=True)
    assert events(streamed)[-2]["error"]["code"] == "internal" and "secret" not in streamed.text


async def test_a_stream_without_an_end_is_an_error() -> None:
    response = await Api(ScriptedEngine(lambda ask: hello(ask)[:2])).chat()
    assert response.status_code == 500


async def test_cached_tokens_never_exceed_the_prompt() -> None:
    def script(ask: Generate) -> list[Item]:
        usage = Usage(prompt_tokens=7, completion_tokens=1, cached_tokens=9)
        return [accepted(ask), Output(rid=ask.rid, token_ids=[1], finish=finish(usage=usage))]

    usage = (await Api(ScriptedEngine(script)).chat()).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 7


async def test_the_vendor_key_comes_only_when_asked_for() -> None:
    api = Api()
    wanted = {"timings": True, "cache": True, "token_ids": True, "stop": True}
    expected = {
        "choices": [
            {
                "index": 0,
                "matched_stop": None,
                "timings": {"queue": 0.5, "prefill": 0.25, "decode": 1.0, "retractions": 0},
                "cache": {
                    "matched_tokens": 4,
                    "position": 4,
                    "reason": "diverged",
                    "ours": 9,
                    "theirs": [],
                },
                "token_ids": [10, 11],
            }
        ]
    }
    assert (await api.chat(tandem=wanted)).json()["tandem"] == expected
    assert events(await api.chat(tandem=wanted, stream=True))[-2]["tandem"] == expected
    assert "tandem" not in (await api.chat()).json()


async def test_messages_reach_the_engine_as_turns() -> None:
    api = Api()
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
        },
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "assistant", "content": "Well", "annotations": []},
    ]
    response = await api.chat(messages=messages, continue_final_message=True)
    assert response.headers["x-tandem-ignored"] == "messages.annotations"
    asked = api.engine.asked[0]
    assert asked.messages == [
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="user", content="hi", name="ann"),
        ChatMessage(role="assistant", content=None),
        ChatMessage(role="assistant", content="Well"),
    ]
    assert asked.chat.continue_final_message and not asked.chat.add_generation_prompt
