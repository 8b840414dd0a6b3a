"""Both faces of the client library, all that they can do, on whole engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from srt.client import AsyncClient, ChatMessage, Client, SamplingParams
from srt.errors import (
    DuplicateRequest,
    EngineDead,
    InvalidRequest,
    NotFound,
    NotReady,
    ProtocolError,
)
from srt.wire.messages import Output
from tests.process.case_rig import GREEDY, balance, metric
from tests.process.conftest import Running, run_inline, run_processes, write_script

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_CLIENTS = 20
WORDS = [f"w{number} " for number in range(NUM_CLIENTS)]
SLOW = 2000  # tokens of a request that nobody waits for
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def said(number: int) -> list[int]:
    """What the prompt p{number} is answered with."""
    return [256 + (number + place) % NUM_CLIENTS for place in range(10)]


def text_of(number: int) -> str:
    return "".join(WORDS[token - 256] for token in said(number))


class Awaited:
    """The asyncio face."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    @classmethod
    async def connect(cls, running: Running) -> Awaited:
        return cls(await AsyncClient.connect(running.engine_end(), name="awaited"))

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        return await getattr(self._client, name)(*args, **options)

    def stream(self, name: str, *args: Any, **options: Any) -> AsyncIterator[Output]:
        outputs: AsyncIterator[Output] = getattr(self._client, name)(*args, **options)
        return outputs

    def end(self) -> None: ...


class Blocking:
    """The blocking face, its calls in threads, so that the same tests can use it."""

    def __init__(self, client: Client, pool: ThreadPoolExecutor) -> None:
        self._client = client
        self._pool = pool

    @classmethod
    async def connect(cls, running: Running) -> Blocking:
        pool = ThreadPoolExecutor(4)
        connect = partial(Client.connect, running.engine_end(), name="blocking")
        return cls(await asyncio.get_running_loop().run_in_executor(pool, connect), pool)

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        work = partial(getattr(self._client, name), *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def stream(self, name: str, *args: Any, **options: Any) -> AsyncIterator[Output]:
        loop = asyncio.get_running_loop()
        outputs = getattr(self._client, name)(*args, **options)
        try:
            while (
                output := await loop.run_in_executor(self._pool, next, outputs, None)
            ) is not None:
                yield output
        finally:
            await loop.run_in_executor(self._pool, outputs.close)

    def end(self) -> None:
        self._pool.shutdown()


Face = Awaited | Blocking


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processes", "inline"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    folder: Path = tmp_path_factory.mktemp("faces") / "script"
    scripts = {f"p{number}": said(number) for number in range(NUM_CLIENTS)}
    scripts["slow"] = [256] * SLOW
    model = write_script(
        folder, WORDS, [256], scripts=scripts, chat_template=TEMPLATE, context_length=4096,
        step_seconds=0.004,
    )  # fmt: skip
    run = run_processes if request.param == "processes" else run_inline
    async with run(model=model, max_total_tokens=65_536, page_size=1) as engine:
        yield engine
        await balance(engine)


@pytest.fixture(params=[Awaited, Blocking], ids=["asyncio", "blocking"])
def kind(request: pytest.FixtureRequest) -> type[Face]:
    found: type[Face] = request.param
    return found


@asynccontextmanager
async def connected(running: Running, kind: type[Face]) -> AsyncIterator[Face]:
    face = await kind.connect(running)
    try:
        yield face
    finally:
        await face.call("close")
        face.end()


@pytest_asyncio.fixture(loop_scope="module")
async def face(running: Running, kind: type[Face]) -> AsyncIterator[Face]:
    async with connected(running, kind) as found:
        yield found
    await balance(running)


@asynccontextmanager
async def slow(face: Face, rid: str, n: int = 1) -> AsyncIterator[list[str]]:
    """A request that is being answered; the list gets its finish reasons."""
    reasons: list[str] = []
    begun = asyncio.Event()

    async def read() -> None:
        async for output in face.stream("stream", "slow", GREEDY, rid=rid, n=n):
            if output.token_ids:
                begun.set()
            if output.finish is not None:
                reasons.append(output.finish.reason)

    reading = asyncio.create_task(read())
    await asyncio.wait_for(begun.wait(), 20)
    yield reasons
    await face.call("abort", rid)
    await asyncio.wait_for(reading, 20)


async def test_generate(face: Face) -> None:
    whole = await face.call("generate", "p3", GREEDY)
    assert (whole.text, whole.samples[0].token_ids[:-1]) == (text_of(3), said(3))
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 11)
    assert whole.samples[0].finish.reason == "stop"
    by_ids = await face.call("generate", list(b"p4"), GREEDY, n=2, echo=True)
    assert [sample.text for sample in by_ids.samples] == [text_of(4)] * 2
    assert (by_ids.prompt_text, by_ids.prompt_token_ids) == ("p4", list(b"p4"))
    with pytest.raises(InvalidRequest) as caught:
        await face.call("generate", "p3", SamplingParams(top_p=0.0))
    assert caught.value.param == "top_p"


@pytest.mark.parametrize("turn", [{"role": "user", "content": "p6"}, ChatMessage("user", "p6")])
async def test_chat(face: Face, turn: Any) -> None:
    whole = await face.call("chat", [turn], GREEDY)
    pieces = [piece async for piece in face.stream("stream_chat", [turn], GREEDY)]
    assert whole.text == "".join(piece.text for piece in pieces) == text_of(6)
    with pytest.raises(InvalidRequest) as caught:
        await face.call("chat", [{"role": "user", "text": "p6"}], GREEDY)
    assert caught.value.param == "messages"


async def test_stream(face: Face) -> None:
    pieces = [piece async for piece in face.stream("stream", "p5", GREEDY)]
    assert "".join(piece.text for piece in pieces) == text_of(5)
    assert [token for piece in pieces for token in piece.token_ids][:-1] == said(5)
    assert [piece.accepted for piece in pieces][:2] == [True, False] and len(pieces) > 5
    assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_leaving_a_stream_is_an_abort(running: Running, face: Face) -> None:
    before = await metric(running, "aborted_total")
    async with aclosing(face.stream("stream", "slow", GREEDY)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            if output.token_ids:
                break
    await balance(running)
    assert await metric(running, "aborted_total") == before + 1


async def test_abort(running: Running, face: Face) -> None:
    async with slow(face, "one") as one, slow(face, "two", n=3) as two:
        with pytest.raises(DuplicateRequest):
            await face.call("generate", "p1", rid="one")
        await face.call("abort", "nobody")
        await face.call("abort", "one")
        await until(lambda: one == ["abort"])
        assert two == []
        assert (await face.call("generate", "p1", GREEDY, rid="one")).text == text_of(1)
        await face.call("abort")
        await until(lambda: two == ["abort"] * 3)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.002)


async def test_tokenize_and_detokenize(face: Face) -> None:
    found = await face.call("tokenize", "w1 é!")
    assert found.token_ids == [257, *"é!".encode()]
    assert b"".join(found.tokens) == "w1 é!".encode()
    turns = [{"role": "user", "content": "w2 "}, {"role": "user", "content": "x"}]
    assert (await face.call("tokenize", messages=turns)).token_ids == [258, ord("x")]
    assert (await face.call("detokenize", found.token_ids)).text == "w1 é!"
    with pytest.raises(InvalidRequest) as caught:
        await face.call("detokenize", [99_999])
    assert caught.value.param == "token_ids"


async def test_flush_cache(running: Running, face: Face) -> None:
    await face.call("generate", "p7", GREEDY)
    await balance(running)
    assert await metric(running, "kv_tokens_evictable") > 2
    assert (await face.call("flush_cache"))["freed_pages"] > 2
    assert await metric(running, "kv_tokens_evictable") == 0
    async with slow(face, "busy"):
        with pytest.raises(NotReady, match="1 requests are live"):
            await face.call("flush_cache")
        flushing = asyncio.create_task(face.call("flush_cache", 20.0))
        await asyncio.sleep(0.05)
        assert not flushing.done()
    assert (await flushing)["freed_pages"] > 0
    with pytest.raises(InvalidRequest):
        await face.call("flush_cache", -1.0)


async def test_metrics_count_what_was_done(running: Running, face: Face) -> None:
    async def seen() -> list[float]:
        found = await face.call("metrics")
        names = ("requests_finished_total", "generation_tokens_total", "prompt_tokens_total")
        return [sum(value for _, value in found[f"tandem_{name}"]["samples"]) for name in names]

    before = await seen()
    await face.call("generate", "p8", GREEDY, n=2)
    await balance(running)
    assert [b - a for a, b in zip(before, await seen(), strict=True)] == [2, 22, 4]


async def test_questions(running: Running, face: Face) -> None:
    config = await face.call("engine_config")
    assert config == await face.call("ask", "config") == await running.client.engine_config()
    assert config["bags"]["schedule"]["page_size"] == 1 and config["trail"]
    assert (await face.call("health"))["phase"] == "ready"
    assert (await face.call("audit")) == {"clean": True, "violations": []}
    assert (await face.call("ask", "profile"))["steps"] > 0
    async with slow(face, "asked"):
        found = await face.call("requests")
        assert [(entry["rid"], entry["state"]) for entry in found["requests"]] == [
            ("asked", "running")
        ]
        [sample] = (await face.call("request", "asked"))["requests"]
        assert sample["waits_for"] is None and sample["timing"]["queue"] >= 0
        assert sample["cache"]["reason"] and sample["completion_tokens"] > 0
    with pytest.raises(NotFound):
        await face.call("request", "asked")
    with pytest.raises(ProtocolError, match="topic"):
        await face.call("ask", "weather")


async def test_many_connections_with_the_same_names(running: Running, kind: type[Face]) -> None:
    """Names are each client's own: nobody gets, aborts or refuses another's."""

    async def use(number: int) -> None:
        async with connected(running, kind) as face:
            for _ in range(2):
                texts = await asyncio.gather(
                    *(
                        face.call("generate", f"p{(number + shift) % NUM_CLIENTS}", GREEDY, rid=rid)
                        for shift, rid in enumerate("abc")
                    )
                )
                assert [found.text for found in texts] == [
                    text_of((number + shift) % NUM_CLIENTS) for shift in range(3)
                ]
            if number % 2:
                async with slow(face, "same") as reasons:
                    await face.call("abort", "same")
                    await until(lambda: reasons == ["abort"])
            else:
                same = await face.call("generate", f"p{number}", GREEDY, rid="same")
                assert same.text == text_of(number)

    await asyncio.gather(*(use(number) for number in range(NUM_CLIENTS)))
    await balance(running)


async def test_a_closed_client_says_so(running: Running, kind: type[Face]) -> None:
    face = await kind.connect(running)
    await face.call("close")
    await face.call("close")
    with pytest.raises(EngineDead, match="closed"):
        await face.call("generate", "p1")
    face.end()
