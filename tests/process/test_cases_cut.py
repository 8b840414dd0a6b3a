"""H16, how soon: the caller hangs up, and next to nothing is generated for it any more. Also while its
grammar is still being compiled, in the tokenizer's process or in the scheduler's."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.process.case_rig import Caller, balance, metric, probe
from tests.process.conftest import Running, run_inline, run_processes, write_script

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "/v1/completions"
OUTPUT = 2000  # tokens that a request which is not cut would generate
STEP = 0.05  # seconds for one of them
FEW = 20  # for each sample: the second that a cut may take at most
ENDLESS = {"prompt": "x", "temperature": 0, "max_tokens": OUTPUT}
NUMBERS = itertools.count()
Entry = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processes", "inline"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    folder: Path = tmp_path_factory.mktemp("cut") / "script"
    model = write_script(
        folder, ["tick ", "pong"], [256] * OUTPUT, scripts={"ping": [257]}, context_length=4096,
        step_seconds=STEP,
    )  # fmt: skip
    run = run_processes if request.param == "processes" else run_inline
    async with run(
        model=model, chunked_prefill_size=16, max_total_tokens=65_536, max_grammar_chars=1_000_000
    ) as engine:
        yield engine


def wide_schema(width: int) -> Entry:
    """A form never seen before. 480 properties take some 40 ms to compile; 2,000 are refused, after
    some 200 ms."""
    first = next(NUMBERS)
    names = [f"name{first}-{number}" for number in range(width)]
    properties = {name: {"type": "string", "maxLength": 8} for name in names}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "wide", "schema": schema}}


async def cut_when(
    running: Running, body: Entry, is_time: Callable[[list[Entry], Entry], bool]
) -> float:
    """Sends it, hangs up when it is time, waits until all is gone. How many tokens came after."""
    caller = await Caller.post(running.url, TEXT, body)
    try:
        async with asyncio.timeout(20):
            while not is_time(
                (await running.client.requests())["requests"], await running.client.health()
            ):
                await asyncio.sleep(0.001)
        before = await metric(running, "generation_tokens_total")
    finally:
        await caller.cut()
    await balance(running)
    return await metric(running, "generation_tokens_total") - before


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_few_tokens_come_after_a_cut(running: Running, is_streamed: bool) -> None:
    for n, prompt, is_time in (
        (1, "x", lambda found: found[0]["completion_tokens"] > 2),
        (4, "x", lambda found: found[-1]["completion_tokens"] > 2),
        (2, f"{next(NUMBERS)}" + "y" * 1500, lambda found: 0 < found[0]["computed_tokens"] < 1500),
    ):
        body = {**ENDLESS, "prompt": prompt, "n": n, "stream": is_streamed}
        after = await cut_when(
            running,
            body,
            lambda found, health, n=n, is_it=is_time: len(found) == n and is_it(found),
        )
        assert after <= (FEW * n if prompt == "x" else 0)
    await probe(running)


async def test_a_cut_while_the_scheduler_waits_for_the_grammar(running: Running) -> None:
    form = wide_schema(480)
    async with running.http() as http:  # the tokenizer's process knows it from now on
        body = {"prompt": "x", "max_tokens": 1, "response_format": form}
        assert (await http.post(TEXT, json=body)).status_code == 200

    def has_begun(found: list[Entry], health: Entry) -> bool:
        reasons = [(entry["waits_for"] or {}).get("reason") for entry in found]
        return reasons.count("grammar") >= 8

    body = {**ENDLESS, "response_format": form, "n": 16}
    assert await cut_when(running, body, has_begun) <= FEW
    await probe(running)


async def test_a_cut_while_the_grammar_is_checked(running: Running) -> None:
    """The scheduler has not heard of it, and never will."""
    for _ in range(3):
        body = {**ENDLESS, "response_format": wide_schema(2000), "n": 16}
        after = await cut_when(
            running, body, lambda found, health: health["live"] > 0 and not found
        )
        assert after == 0
    await probe(running)
