"""The client library against a real service: both faces, ends, silence, many at once."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from service_rig import CARD, Rig, ToyCodec, ToyEngine, make_rig, until

from srt import errors
from srt.client import AsyncClient, ChatMessage, Client, SamplingParams
from srt.client.options import build_request
from srt.wire import codec
from srt.wire.limits import Limits
from srt.wire.memory import MemoryRouter, memory_pipe
from srt.wire.messages import Generate, Output, Outputs, Welcome
from srt.wire.params import Finish
from srt.wire.sockets import ZmqRouter, close_context, open_context
from tokenizer_proc.tokenizer import TokenizerService


async def test_a_stream_is_pieces_then_an_end() -> None:
    async with make_rig() as rig, await rig.client() as client:
        rig.engine.auto = ["a", "b", "c"]
        items = [item async for item in client.stream("hi", SamplingParams(max_tokens=3))]
        assert items[0].accepted and items[0].prompt_tokens == 3
        assert "".join(item.text for item in items) == "abc"
        assert [item.finish is not None for item in items] == [False] * 3 + [True]
        assert rig.engine.works()[0].text.stream


async def test_samples_are_told_apart() -> None:
    async with make_rig() as rig, await rig.client() as client:
        seen = [item.index async for item in client.stream("hi", n=2) if item.finish]
        assert sorted(seen) == [0, 1]


@pytest.mark.parametrize("n", [0, -1, 10_000])
async def test_an_odd_number_of_samples_is_refused_aloud(n: int) -> None:
    async with make_rig() as rig, await rig.client() as client:
        for _ in range(2):
            with pytest.raises(errors.InvalidRequest, match="^n is"):
                await client.generate("hi", n=n, rid="same")
        with pytest.raises(errors.InvalidRequest, match="^n is"):
            await anext(client.stream("hi", n=n, rid="same"))


async def test_leaving_a_stream_aborts_and_keeps_the_name_until_it_is_over() -> None:
    async with make_rig() as rig, await rig.client() as client:
        rig.engine.auto = None
        rig.engine.obeys = False
        async with aclosing(client.stream("hi", rid="r")) as stream:
            first = asyncio.ensure_future(anext(stream))
            await until(lambda: rig.engine.open)
            [uid] = rig.engine.open
            rig.engine.say(rig.engine.item(uid, "a", opened=True))
            assert (await first).text == "a"
        await until(rig.engine.aborts)
        with pytest.raises(errors.DuplicateRequest, match="still being aborted"):
            await client.generate("other", rid="r")
        rig.engine.say(rig.engine.end(uid, "abort", "late words"))
        await until(lambda: not len(rig.service._requests))
        rig.engine.auto = ["x"]
        await asyncio.sleep(0.01)
        assert (await client.generate("other", rid="r")).text == "x"


async def test_cancelling_aborts() -> None:
    async with make_rig() as rig, await rig.client() as client:
        rig.engine.auto = None
        pending = asyncio.create_task(client.generate("hi"))
        await until(lambda: rig.engine.open)
        pending.cancel()
        await until(lambda: not rig.engine.open)
        with pytest.raises(asyncio.CancelledError):
            await pending


async def test_closing_aborts_and_wakes_what_waits() -> None:
    async with make_rig() as rig:
        client = await rig.client()
        rig.engine.auto = None
        pending = asyncio.create_task(client.generate("hi"))
        await until(lambda: rig.engine.open)
        await client.close()
        await client.close()
        with pytest.raises(errors.EngineDead, match="closed"):
            await pending
        with pytest.raises(errors.EngineDead, match="closed"):
            await client.generate("hi")
        await until(lambda: not rig.engine.open)


async def test_names_are_guarded_here_too() -> None:
    async with make_rig() as rig, await rig.client() as client:
        rig.engine.auto = None
        pending = asyncio.create_task(client.generate("hi", rid="r"))
        await until(lambda: rig.engine.open)
        with pytest.raises(errors.DuplicateRequest):
            await client.generate("hi", rid="r")
        await client.abort("r")
        assert (await pending).samples[0].finish is not None


async def test_what_cannot_be_sent_is_the_callers_fault() -> None:
    async with make_rig() as rig, await rig.client() as client:
        with pytest.raises(errors.InvalidRequest):
            await client.generate("\ud800")
        with pytest.raises(errors.InvalidRequest):
            await client.generate("a", SamplingParams(seed=2**70))
        with pytest.raises(errors.InvalidRequest):
            await client.chat([{"rôle": "user"}])
        with pytest.raises(errors.InvalidRequest, match="temperature"):
            await client.generate("a", SamplingParams(temperature="hot"))  # type: ignore[arg-type]
        assert (await client.generate("a")).text == "ab"


async def test_a_reader_that_is_too_slow_is_aborted() -> None:
    async with make_rig() as rig, await rig.client(buffer=5) as client:
        rig.engine.auto = None
        stream = client.stream("hi")
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: rig.engine.open)
        [uid] = rig.engine.open
        for _ in range(20):
            rig.engine.say(rig.engine.item(uid, "a"))
        await first
        await until(lambda: not rig.engine.open)
        with pytest.raises(errors.RequestAborted, match="unread"):
            async for _ in stream:
                pass


async def test_a_silent_engine_is_dead() -> None:
    router = MemoryRouter()
    connecting = asyncio.create_task(AsyncClient.connect(router.connect(), stall_seconds=0.1))
    [(peer, hello)] = await router.receive()
    welcome = Welcome(
        rid=hello.rid or "",
        version=1,
        model="m",
        context_length=1,
        vocab_size=1,
        has_chat_template=False,
        engine_id="",
        config_hash="",
    )
    router.send(peer, welcome)
    async with await connecting as client:
        with pytest.raises(errors.EngineDead, match="said nothing"):
            await client.generate("hi")
        with pytest.raises(errors.EngineDead, match="no answer"):
            await client.health(timeout=0.01)
        pending = asyncio.create_task(client.generate("hi", rid="r"))
        while not isinstance((await router.receive())[-1][1], Generate):
            pass
        router.send(peer, Outputs(items=[Output(rid="?"), Output(rid="r", text="a")]))
        end = Output(rid="r", finish=Finish(reason="stop"))
        router.send(peer, Outputs(items=[end, end]))
        assert (await pending).text == "a"
    router.close()


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(errors.NotReady, match="no engine answers"):
        await AsyncClient.connect(f"ipc://{tmp_path}/none", timeout=0.05)
    with pytest.raises(errors.NotReady):
        await asyncio.to_thread(Client.connect, f"ipc://{tmp_path}/none", timeout=0.05)


@asynccontextmanager
async def over_ipc(folder: Path) -> AsyncIterator[tuple[str, Rig]]:
    """The toy engine behind a real socket."""
    context = open_context()
    router = ZmqRouter(context, f"ipc://{folder}/front")
    to_engine, at_engine = memory_pipe(codec.work())
    to_service, at_service = memory_pipe(codec.text())
    engine = ToyEngine(at_engine, to_service)
    service = TokenizerService(
        router, to_engine, at_service, ToyCodec(), Limits(), CARD, tick=0.01, drain_seconds=0.2
    )
    rig = Rig(MemoryRouter(), engine, service)
    playing = asyncio.create_task(engine.run())
    running = asyncio.create_task(service.run(rig.stop))
    yield router.endpoint, rig
    rig.stop.set()
    await asyncio.wait_for(running, 20)
    playing.cancel()
    router.close()
    assert close_context(context)
    assert list(folder.iterdir()) == []


def use_blocking(endpoint: str) -> list[str]:
    with Client.connect(endpoint, name="test") as client:
        assert client.welcome.model == "toy"
        texts: list[str] = []

        def work() -> None:
            texts.append(client.generate("hi", SamplingParams(max_tokens=2)).text)
            texts.append("".join(output.text for output in client.stream([1, 2])))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        turns = [ChatMessage(role="user", content="a")]
        texts.append(client.chat(turns).text)
        texts += [output.text for output in client.stream_chat([{"role": "user", "content": "a"}])]
        assert client.tokenize("hi").token_ids == [1, 104, 105]
        assert client.detokenize([104]).text == "h"
        assert client.metrics() == {"topic": "metrics"}
        assert client.audit() == {"topic": "audit"}
        assert client.health()["live"] == 0
        with pytest.raises(errors.InvalidRequest):
            client.generate("hi", SamplingParams(top_p=0.0))
        client.abort()
    with pytest.raises(errors.EngineDead):
        client.generate("hi")
    client.close()
    return texts


async def test_the_blocking_face_from_many_threads(tmp_path: Path) -> None:
    async with over_ipc(tmp_path) as (endpoint, _):
        texts = await asyncio.to_thread(use_blocking, endpoint)
        assert texts == ["ab"] * 9 + ["", "a", "b"]


async def test_leaving_a_blocking_stream_aborts(tmp_path: Path) -> None:
    async with over_ipc(tmp_path) as (endpoint, rig):
        rig.engine.auto = None

        def use() -> None:
            with Client.connect(endpoint) as client:
                for _ in client.stream("hi"):
                    break

        using = asyncio.create_task(asyncio.to_thread(use))
        await until(lambda: rig.engine.open)
        rig.engine.say(*(rig.engine.item(uid, "a", opened=True) for uid in rig.engine.open))
        await using
        await until(lambda: not rig.engine.open)


KILLED = """
import sys
from srt.client import Client
for output in Client.connect(sys.argv[1]).stream("hi", n=2):
    print("started", flush=True)
"""


async def test_a_killed_client_is_an_abort(tmp_path: Path) -> None:
    async with over_ipc(tmp_path) as (endpoint, rig):
        rig.engine.auto = None
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, endpoint, stdout=subprocess.PIPE
        )
        await until(lambda: len(rig.engine.open) == 2)
        rig.engine.say(*(rig.engine.item(uid, "a", opened=True) for uid in rig.engine.open))
        assert child.stdout is not None
        await asyncio.wait_for(child.stdout.readline(), 20)
        child.kill()
        await child.communicate()
        await until(lambda: not rig.engine.open)


def test_no_torch() -> None:
    code = "import sys, srt.client, tokenizer_proc.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias={"seven": 1.0}), "logit_bias"),  # type: ignore[dict-item]
        (SamplingParams(max_tokens="many"), "max_tokens"),  # type: ignore[arg-type]
        (SamplingParams(stop="x"), "stop"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_field(
    params: SamplingParams, field: str
) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        build_request("r", "x", params, False, {})
    assert caught.value.param == field and field in caught.value.message


def test_an_interrupt_while_connecting_leaves_nothing_open(tmp_path: Path) -> None:
    """What was connecting closes what it had opened; else the loop's end complains of it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    names = {thread.name for thread in threading.enumerate()}
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            Client.connect(f"ipc://{tmp_path}/none", timeout=20)
        gc.collect()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert "tandem-client" not in {thread.name for thread in threading.enumerate()} - names
