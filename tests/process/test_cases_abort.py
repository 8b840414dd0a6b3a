"""The caller goes away, at every point of a request's life, over HTTP and over ZMQ: the engine stops
working for it, frees what it held, and nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from srt.client import AsyncClient, SamplingParams
from tests.process.case_rig import GREEDY, Caller, balance, metric, neighbour, probe
from tests.process.conftest import Running, run_inline, run_processes, write_script

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORDS = ["tick ", "pong"]
OUTPUT = 3000  # tokens that a request which is not cut would generate: 12 s
FEW = OUTPUT // 2  # far more than a cut needs to arrive, on however slow a machine
CHUNK = 16
ENDLESS = {"prompt": "x", "temperature": 0, "max_tokens": OUTPUT}
NUMBERS = itertools.count(100_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processes", "inline"])
async def engine_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    folder: Path = tmp_path_factory.mktemp("abort") / "script"
    scripts = {"neighbour": [256] * 60, "ping": [257], "quick": [257]}
    model = write_script(
        folder, WORDS, [256] * OUTPUT, scripts=scripts, context_length=4096, step_seconds=0.004
    )
    run = run_processes if request.param == "processes" else run_inline
    async with run(
        model=model, chunked_prefill_size=CHUNK, max_running=6, max_total_tokens=16_384
    ) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def running(engine_of_module: Running) -> AsyncIterator[Running]:
    """With a neighbour that must not notice; afterwards nothing is held and little was generated."""
    before = await metric(engine_of_module, "generation_tokens_total")
    async with neighbour(engine_of_module, "neighbour", "tick " * 60):
        yield engine_of_module
    assert await metric(engine_of_module, "generation_tokens_total") - before < FEW


Entry = dict[str, Any]


def long_prompt() -> str:
    """56 chunks of which the cache has none."""
    return f"{next(NUMBERS)}" + "y" * 894


async def wait_for(running: Running, count: int, is_there: Callable[[Entry], bool]) -> None:
    """Until `count` live samples, the neighbour aside, are where the case wants them."""
    for _ in range(2000):
        entries = (await running.client.requests())["requests"]
        if sum(e["prompt_tokens"] != len("neighbour") and is_there(e) for e in entries) == count:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"never seen: {entries}")


def in_prefill(entry: Entry) -> bool:
    return 0 < entry["computed_tokens"] < entry["prompt_tokens"]


def in_decode(entry: Entry) -> bool:
    return bool(entry["completion_tokens"] > 1)


def is_queued(entry: Entry) -> bool:
    return entry["position"] is not None


# --- over HTTP ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_a_cut_socket(running: Running, streams: bool, reset: bool) -> None:
    cases: list[tuple[Entry, int, Callable[[Entry], bool]]] = [
        ({**ENDLESS, "prompt": long_prompt()}, 1, in_prefill),
        (ENDLESS, 1, in_decode),
        ({**ENDLESS, "n": 4}, 4, in_decode),
        ({**ENDLESS, "prompt": long_prompt(), "n": 4}, 1, in_prefill),
        ({**ENDLESS, "prompt": ["x", "y"], "n": 2}, 4, in_decode),
        ({**ENDLESS, "n": 12}, 7, is_queued),  # 6 run, one of them the neighbour
    ]
    for body, count, is_there in cases:
        body = {**body, "stream": streams}
        caller = await Caller.post(running.url, "/v1/completions", body)
        if is_there is not is_queued:
            await wait_for(running, count, is_there)
        else:
            await wait_for(running, 12, lambda entry: True)
        if streams:
            await caller.read_until(b"200 OK")
        await caller.cut(reset=reset)
        await wait_for(running, 0, lambda entry: True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
async def test_a_cut_socket_of_other_routes(running: Running, path: str) -> None:
    start: Entry = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}
    start = {**(start or {"prompt": "x"}), "temperature": 0, "stream": True}
    caller = await Caller.post(running.url, path, start)
    await caller.read_until(b"tick ")
    await caller.cut()
    await wait_for(running, 0, lambda entry: True)


async def test_cuts_around_the_last_token(running: Running) -> None:
    """Requests of one token, cut at any moment: before it, with it, after it, after the reply."""
    draw = random.Random(7)
    for number in range(40):
        body = {"prompt": "quick", "max_tokens": 1 + number % 2, "stream": bool(number % 3)}
        caller = await Caller.post(running.url, "/v1/completions", {**body, "temperature": 0})
        await asyncio.sleep(draw.random() * 0.03)
        await caller.cut(reset=bool(number % 2))
    await wait_for(running, 0, lambda entry: True)


async def test_a_crowd_leaves_at_once(running: Running) -> None:
    callers = [
        await Caller.post(running.url, "/v1/completions", {**ENDLESS, "stream": bool(number % 2)})
        for number in range(30)
    ]
    await wait_for(running, 30, lambda entry: True)
    await asyncio.gather(*(caller.cut(reset=True) for caller in callers))
    await wait_for(running, 0, lambda entry: True)


async def test_a_name_is_free_again_after_a_cut(running: Running) -> None:
    """The same request_id may be used again, and only its own text comes."""
    for _ in range(5):
        caller = await Caller.post(
            running.url, "/v1/completions", {**ENDLESS, "request_id": "mine", "stream": True}
        )
        await caller.read_until(b"tick ")
        await caller.cut()
        async with running.http() as http:
            for _ in range(200):
                body = {"prompt": "quick", "request_id": "mine", "temperature": 0}
                answer = await http.post("/v1/completions", json=body)
                if answer.status_code != 409:
                    break
                await asyncio.sleep(0.01)
            assert answer.json()["choices"][0]["text"] == "pong"


async def test_a_name_is_free_again_after_the_end(running: Running) -> None:
    """Whoever has read the last byte may use the name again at once, on any connection."""
    body = {"prompt": "quick", "request_id": "again", "temperature": 0, "stream": True}
    for _ in range(20):
        caller = await Caller.post(running.url, "/v1/completions", body)
        answer = await caller.read_until(b"data: [DONE]")
        assert b"200 OK" in answer and b"pong" in answer, answer
        await caller.cut()


async def test_abort_over_http_ends_the_stream_with_an_error(running: Running) -> None:
    for n, body in (
        (1, ENDLESS),
        (3, {**ENDLESS, "n": 3}),
        (1, {**ENDLESS, "prompt": long_prompt()}),
    ):
        name = f"named-{next(NUMBERS)}"
        named = {**body, "request_id": name, "stream": True}
        caller = await Caller.post(running.url, "/v1/completions", named)
        await wait_for(running, n, lambda entry: True)
        async with running.http() as http:
            answer = await http.post("/abort", json={"request_id": name})
            assert answer.json()["aborted"] == [name]
            again = await http.post("/abort", json={"request_id": "nobody"})
            assert again.json()["aborted"] == []
        rest = await caller.read_until(b"data: [DONE]")
        assert b'"code":"aborted"' in rest
        await caller.cut()


# --- over ZMQ ----------------------------------------------------------------------------------------


@asynccontextmanager
async def reading(
    client: AsyncClient, prompt: str, ends: list[str], rid: str, n: int = 1
) -> AsyncIterator[asyncio.Task[None]]:
    async def read() -> None:
        async for output in client.stream(prompt, GREEDY, rid=rid, n=n):
            if output.finish is not None:
                ends.append(output.finish.reason)

    task = asyncio.create_task(read())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("how", ["cancel", "abort", "abort_all"])
async def test_leaving_over_zmq(running: Running, how: str) -> None:
    client = running.client
    if how == "abort_all":  # the neighbour belongs to another client
        assert running.connect is not None
        client = await running.connect()
    for prompt, n, count, is_there in (
        (long_prompt(), 1, 1, in_prefill),
        (long_prompt(), 4, 1, in_prefill),
        ("x", 1, 1, in_decode),
        ("x", 4, 4, in_decode),
        ("x", 12, 12, lambda entry: True),
    ):
        ends: list[str] = []
        async with reading(client, prompt, ends, "gone", n) as task:
            await wait_for(running, count, is_there)
            if how == "abort_all":
                await client.abort()
                await task
            elif how != "cancel":
                await client.abort("gone")
                await client.abort("gone")  # twice is once
                await client.abort("never there")
                await task
        assert ends == ([] if how == "cancel" else ["abort"] * n)
        await wait_for(running, 0, lambda entry: True)
    if client is not running.client:
        await client.close()


async def test_aborts_around_the_last_token(running: Running) -> None:
    """Exactly one end each, whoever was first; and the name is free at once."""
    draw = random.Random(11)
    for number in range(40):
        ends: list[str] = []
        async with reading(running.client, "quick", ends, "same", 1 + number % 3) as task:
            await asyncio.sleep(draw.random() * 0.02)
            await running.client.abort("same")
            await asyncio.wait_for(task, 10)
        assert len(ends) == 1 + number % 3 and set(ends) <= {"stop", "abort"}
    ends = []
    async with reading(running.client, "quick", ends, "same") as task:
        await task
    assert ends == ["stop"]


async def test_an_abort_right_behind_its_request(running: Running) -> None:
    """In one batch with it, so that it is aborted before it is tokenized or scheduled."""
    client = running.client
    for n in (1, 4):
        for text in ("x", "z" * 20_000 if n == 1 else long_prompt()):  # 20,000: checked and refused
            stream = client.stream(text, SamplingParams(max_tokens=5), rid="brief", n=n)
            first = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            await client.abort("brief")
            await asyncio.wait({first})
            if first.exception() is None:
                async for _ in stream:
                    pass
            await stream.aclose()
    await wait_for(running, 0, lambda entry: True)


async def test_a_client_that_closes_with_open_streams(running: Running) -> None:
    assert running.connect is not None
    client = await running.connect()
    ends: list[str] = []
    async with reading(client, "x", ends, "a", 4), reading(client, long_prompt(), ends, "b"):
        await wait_for(running, 5, lambda entry: True)
        await client.close()
    await wait_for(running, 0, lambda entry: True)


async def test_nothing_is_left(engine_of_module: Running) -> None:
    await balance(engine_of_module)
    await probe(engine_of_module)
