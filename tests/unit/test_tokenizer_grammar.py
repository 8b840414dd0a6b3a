"""Grammars at the engine's front door: checked before anything is sent on, and nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from grammar_vocab import TABLE, schema
from service_rig import make_rig

import tokenizer_proc.intake as intake
from srt.errors import InvalidRequest, InvalidSchema
from srt.structured.service import Compiler
from srt.wire.params import Grammar, SamplingParams

GOOD = SamplingParams(max_tokens=4, grammar=Grammar(kind="regex", text="a+"))
BAD = SamplingParams(max_tokens=4, grammar=schema({"type": "objekt"}))


async def test_what_is_good_goes_on_as_it_is_and_what_is_bad_does_not() -> None:
    async with make_rig(compiler=Compiler(lambda: TABLE, "test")) as rig:
        client = await rig.client()
        await client.generate("hello", GOOD)
        for _ in range(2):
            with pytest.raises(InvalidSchema, match="objekt") as caught:
                await client.generate("hello", BAD)
            assert caught.value.param == "response_format"
        [work] = rig.engine.works()
        assert work.params.grammar == GOOD.grammar
        assert (await client.health())["live"] == 0
        await client.close()


async def test_without_a_compiler_they_are_refused() -> None:
    async with make_rig() as rig:
        client = await rig.client()
        with pytest.raises(InvalidRequest, match="serves no grammars"):
            await client.generate("hello", GOOD)
        assert not rig.engine.works()
        await client.close()


class Stuck(Compiler):
    """Never done until released."""

    def __init__(self) -> None:
        super().__init__(lambda: TABLE, "test")
        self.gate = threading.Event()
        self.asked: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(1)

    def check(self, grammar: Grammar) -> Future[None]:
        self.asked.append(self._pool.submit(self._wait))
        return self.asked[-1]

    def _wait(self) -> None:
        self.gate.wait(20)

    def close(self) -> None:
        self.gate.set()
        self._pool.shutdown(wait=True)
        super().close()


async def test_h4_a_compiler_that_is_stuck_stops_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "GRAMMAR_SECONDS", 0.2)
    compiler = Stuck()
    async with make_rig(compiler=compiler) as rig:
        client = await rig.client()
        stuck = [asyncio.create_task(client.generate("hello", GOOD)) for _ in range(3)]
        while len(compiler.asked) < 3:
            await asyncio.sleep(0)
        await client.generate("others", SamplingParams(max_tokens=2))
        assert (await client.health())["live"] == 3
        for task in stuck:
            with pytest.raises(InvalidSchema, match="could not be compiled within"):
                await task
        assert [future.cancelled() for future in compiler.asked] == [False, True, True]
        assert (await client.health())["live"] == 0
        await client.close()


async def test_an_abort_while_it_is_checked_ends_the_request_once() -> None:
    compiler = Stuck()
    async with make_rig(compiler=compiler) as rig:
        client = await rig.client()
        task = asyncio.create_task(client.generate("hello", GOOD, rid="one"))
        while not compiler.asked:
            await asyncio.sleep(0)
        await client.abort("one")
        generation = await task
        assert generation.samples[0].finish.reason == "abort"
        compiler.gate.set()
        await asyncio.sleep(0.05)
        assert not rig.engine.works() and (await client.health())["live"] == 0
        await client.close()
