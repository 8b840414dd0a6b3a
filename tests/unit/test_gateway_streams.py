"""Streams and the people at the other end: hanging up, reading slowly, waiting long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_engine import Api, Caller, Item, ScriptedEngine, accepted, finish, hello

from srt.gateway.live import Live
from srt.gateway.sse import PING
from srt.wire.messages import Generate, Output

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def stuck(*before: str) -> ScriptedEngine:
    """Some text, then nothing more for ever."""

    def script(ask: Generate) -> list[Item]:
        texts = [Output(rid=ask.rid, text=text, token_ids=[1]) for text in before]
        return [accepted(ask), *texts, asyncio.Event()]

    return ScriptedEngine(script)


def queued() -> ScriptedEngine:
    return ScriptedEngine(lambda ask: [asyncio.Event()])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 4}])
@pytest.mark.parametrize(
    "engine", [queued, stuck, lambda: stuck("a")], ids=["queued", "prefill", "decode"]
)
async def test_hanging_up_aborts(stream: bool, fields: dict[str, Any], engine: Any) -> None:
    api = Api(engine())
    caller = Caller(api.app, "/v1/chat/completions", {**CHAT, **fields, "stream": stream})
    await caller.until(lambda: bool(api.engine.asked))
    for _ in range(20):  # into whatever phase there is
        await asyncio.sleep(0)
    caller.hang_up()
    await asyncio.wait_for(caller.task, 5)
    assert api.engine.closed == [api.engine.asked[0].rid]
    assert len(api.gateway.live) == 0
    assert ("[DONE]" in caller.text) is False
    samples = api.gateway.tally.snapshot()["tandem_http_disconnects_total"]["samples"]
    assert samples == [[{}, 1.0]]


async def test_hanging_up_aborts_every_prompt() -> None:
    api = Api(stuck("a"))
    body = {"prompt": ["a", "b", "c"], "stream": True}
    caller = Caller(api.app, "/v1/completions", body)
    await caller.until(lambda: caller.text.count("data:") == 3)
    caller.hang_up()
    await asyncio.wait_for(caller.task, 5)
    assert sorted(api.engine.closed) == sorted(ask.rid for ask in api.engine.asked)
    assert len(api.engine.asked) == 3


async def test_a_complete_stream_aborts_nothing() -> None:
    api = Api()
    caller = Caller(api.app, "/v1/chat/completions", {**CHAT, "stream": True})
    await asyncio.wait_for(caller.task, 5)
    assert caller.text.endswith("data: [DONE]\n\n") and not api.engine.closed
    assert caller.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_slow_reader_is_cut() -> None:
    def script(ask: Generate) -> list[Item]:
        flood = [Output(rid=ask.rid, text="x" * 100, token_ids=[1]) for _ in range(1000)]
        return [accepted(ask), *flood, asyncio.Event()]

    api = Api(ScriptedEngine(script), stream_buffer_bytes=10_000)
    caller = Caller(api.app, "/v1/chat/completions", {**CHAT, "stream": True})
    caller.reads.clear()
    await asyncio.wait_for(caller.task, 5)
    assert api.engine.closed and len(api.gateway.live) == 0
    samples = api.gateway.tally.snapshot()["tandem_http_slow_readers_total"]["samples"]
    assert samples == [[{}, 1.0]]


async def test_a_busy_socket_gets_many_events_in_one_write() -> None:
    api = Api()
    caller = Caller(api.app, "/v1/chat/completions", {**CHAT, "stream": True})
    caller.reads.clear()
    await caller.until(lambda: api.gateway.num_tokens == 2)
    caller.reads.set()
    await asyncio.wait_for(caller.task, 5)
    assert len(caller.sent) == 3 and caller.text.count("data:") == 5


async def test_silence_is_filled_with_comments() -> None:
    gate = asyncio.Event()

    def script(ask: Generate) -> list[Item]:
        first, *rest = hello(ask)
        return [first, gate, *rest]

    api = Api(ScriptedEngine(script), ping_seconds=0.001)
    caller = Caller(api.app, "/v1/completions", {"prompt": "x", "stream": True})
    async with asyncio.timeout(10):
        while caller.text.count(": ping") < 3:
            await asyncio.sleep(0.001)
    assert caller.text.startswith(PING.decode())
    gate.set()
    await asyncio.wait_for(caller.task, 5)
    assert caller.text.endswith("data: [DONE]\n\n")


async def test_streams_at_once_do_not_mix() -> None:
    def script(ask: Generate) -> list[Item]:
        texts = [Output(rid=ask.rid, text=f"{ask.prompt} ", token_ids=[1]) for _ in range(20)]
        return [accepted(ask), *texts, Output(rid=ask.rid, finish=finish())]

    api = Api(ScriptedEngine(script))
    callers = [
        Caller(api.app, "/v1/completions", {"prompt": f"p{i}", "stream": True}) for i in range(20)
    ]
    await asyncio.gather(*(caller.task for caller in callers))
    for i, caller in enumerate(callers):
        assert caller.text.count(f"p{i} ") == 20 and caller.text.count('"text":"p') == 20


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"prompt": ["x", "y"]}])
async def test_an_abort_before_acceptance_is_told_as_one(
    more: dict[str, Any], stream: bool
) -> None:
    def script(ask: Generate) -> list[Item]:
        return [Output(rid=ask.rid, index=index, finish=finish("abort")) for index in range(ask.n)]

    api = Api(ScriptedEngine(script))
    answer = await api.post("/v1/completions", {"prompt": "x", "stream": stream, **more})
    assert answer.status_code == 499 and answer.json()["error"]["code"] == "aborted"
    assert len(api.gateway.live) == 0


async def test_drain_refuses_new_and_ends_old() -> None:
    api = Api(stuck("a"), drain_seconds=0.01)
    caller = Caller(api.app, "/v1/chat/completions", {**CHAT, "stream": True})
    await caller.until(lambda: "data:" in caller.text)
    draining = asyncio.create_task(api.gateway.drain())
    await caller.until(lambda: api.engine.aborted == [None])
    refused = await api.chat()
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["code"] == "shutting_down"
    caller.hang_up()
    await asyncio.gather(draining, caller.task)


async def test_what_the_drain_aborts_ends_with_an_error_of_the_server() -> None:
    gate = asyncio.Event()

    def script(ask: Generate) -> list[Item]:
        return [accepted(ask), gate, Output(rid=ask.rid, finish=finish("abort"))]

    api = Api(ScriptedEngine(script))
    caller = Caller(api.app, "/v1/chat/completions", {**CHAT, "stream": True})
    await caller.until(lambda: "data:" in caller.text)
    api.gateway.live.is_draining = True
    gate.set()
    await asyncio.wait_for(caller.task, 5)
    assert '"code":"shutting_down"' in caller.text and caller.text.endswith("[DONE]\n\n")


async def test_live_waits_until_empty() -> None:
    live = Live()
    assert await live.wait_empty(0)
    live.enter("a", ["a"])
    assert not await live.wait_empty(0.001)
    live.leave("a")
    assert await live.wait_empty(1) and live.rids("a") == ()
