"""Engines whose model is divided among processes: the answers of one process, and one life for all."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from srt.client import AsyncClient, Generation, SamplingParams
from srt.errors import EngineDead, InternalError
from srt.wire.params import Grammar
from tests.process.conftest import Running, run_processes
from tests.process.served import Served
from tests.process.test_deaths import name_of, until_running
from tests.tiny_models import TINY

FLOAT = {"dtype": "float32", "num_threads": 1}  # rounding does not decide near ties
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def requests() -> list[tuple[str, SamplingParams]]:
    """Greedy ones and drawn ones, rules, logprobs, a grammar."""
    return [
        (
            "ABCDEFGH" * 5,
            SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2),
        ),
        ("ABCDEFGH" * 4, SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=1)),
        ("HGFEDC", SamplingParams(seed=5, max_tokens=30, ignore_eos=True, repetition_penalty=1.3)),
        ("x", SamplingParams(seed=6, max_tokens=30, top_p=0.9, top_k=20, temperature=1.3)),
        (
            "AAAAAA",
            SamplingParams(
                seed=7, max_tokens=40, grammar=Grammar(kind="regex", text="(AB|CD){4,9}E")
            ),
        ),
        ("again and again and again", SamplingParams(temperature=0.0, max_tokens=40)),
    ]


def told(answer: Generation) -> Any:
    """All but the logprobs' last digits and the times."""
    [sample] = answer.samples
    assert sample.finish is not None
    logprobs = [entry.chosen.logprob for entry in sample.logprobs or []]
    scores = [0.0 if e is None else e.chosen.logprob for e in answer.prompt_logprobs or []]
    return (
        sample.token_ids,
        sample.text,
        sample.finish.reason,
        [round(value, 3) for value in logprobs + scores],
    )


async def ask_all(running: Running) -> list[Any]:
    asked = [running.client.generate(text, params) for text, params in requests()]
    answers = [told(answer) for answer in await asyncio.gather(*asked)]
    await running.settle()
    return answers


def eagle_folder(folder: Path) -> str:
    """An EAGLE-3 draft without weights that uses the target's head, which the ranks share."""
    config = {
        **TINY,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": TINY["vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


async def test_ranks_answer_as_one_process_does(checkpoint: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": str(checkpoint), **FLOAT}
    async with run_processes(**given) as running:
        alone = await ask_all(running)
    async with run_processes(**given, tensor_parallel_size=2, max_step_tokens=16) as running:
        assert sorted(running.pids) == [
            "detokenizer",
            "gateway",
            "rank-1",
            "scheduler",
            "tokenizer",
        ]
        assert await ask_all(running) == alone
        await check_abort(running)
        await check_idle(running)
        config = await running.client.engine_config()
        assert config["bags"]["parallel"]["tensor_parallel_size"] == 2
    eagle = {"speculative_algorithm": "eagle3", "speculative_draft_load_format": "dummy"}
    eagle["speculative_draft_model"] = eagle_folder(tmp_path / "eagle")
    for ways in ({"speculative_algorithm": "ngram"}, eagle):
        async with run_processes(**given, tensor_parallel_size=2, **ways) as running:
            assert await ask_all(running) == alone, ways


async def check_abort(running: Running) -> None:
    """In the middle of it, and the pages come back."""
    task = asyncio.create_task(running.client.generate("ABC", LONG))
    await until_running(running.client, 1, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await running.settle()


async def check_idle(running: Running) -> None:
    """Every rank sleeps, and listens nowhere but on this machine."""
    ranks = [psutil.Process(running.pids[role]) for role in ("scheduler", "rank-1")]
    before = [sum(rank.cpu_times()[:2]) for rank in ranks]
    await asyncio.sleep(2.0)
    for rank, start in zip(ranks, before, strict=True):
        assert sum(rank.cpu_times()[:2]) - start < 0.2
        for socket in rank.net_connections():
            assert not socket.laddr or socket.laddr.ip in ("127.0.0.1", "::1"), socket


@pytest.mark.parametrize("role", ["rank-1", "scheduler"])
async def test_a_rank_that_is_killed_ends_the_engine(
    checkpoint: Path, tmp_path: Path, role: str
) -> None:
    front = f"ipc://{tmp_path}/front"
    flags = ("--dtype", "float32", "--num-threads", "1", "--tensor-parallel-size", "2")
    with Served(
        tmp_path, "--model", str(checkpoint), "--zmq-front", front, "--stall-seconds", "600", *flags
    ) as served:
        url = await asyncio.to_thread(served.wait_ready)
        children = served.children()
        client = await AsyncClient.connect(front, stall_seconds=600.0)
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            name = await name_of(http)
            over_zmq = asyncio.create_task(client.generate("ABC", LONG))
            body = {"model": name, "prompt": "x", "stream": True, "temperature": 0}
            body |= {"max_tokens": 200, "ignore_eos": True}
            over_http = asyncio.create_task(http.post("/v1/completions", json=body))
            await until_running(client, 2, 2)
            killed = time.monotonic()
            children[role].kill()
            # The death is announced, and a rank that lost another says so: whichever comes first.
            with pytest.raises((EngineDead, InternalError)):
                await over_zmq
            answer = await over_http
            assert '"error"' in answer.text.split("\n\n")[-3], answer.text[-300:]
            assert time.monotonic() - killed < 10
            code, errors = await asyncio.to_thread(served.end)
        await client.close()
        assert code == 1, errors
        assert f"{role} ended with code -9" in errors
        assert not [child for child in children.values() if child.is_running()]
        assert not served.leftovers()
