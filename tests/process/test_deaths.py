"""A process dies or freezes: it is noticed, every open request ends with an error, nothing is left.

The stall times are either far beyond the test, so that only the notice of a death can end a request,
or short, so that only the missing heartbeat can.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from srt.client import AsyncClient, SamplingParams
from srt.errors import EngineDead
from tests.process.conftest import RunEngine, Running
from tests.process.served import Served, slow_script

GREEDY = SamplingParams(temperature=0.0)
ENGINE = ["scheduler", "tokenizer", "detokenizer"]
NEVER = "600"  # seconds


async def stream(http: httpx.AsyncClient, model: str, max_tokens: int = 200) -> httpx.Response:
    body = {"model": model, "prompt": "x", "stream": True, "temperature": 0}
    body["max_tokens"] = max_tokens
    return await http.post("/v1/completions", json=body)


def check_error(answer: httpx.Response, word: str) -> None:
    """An event with the error in a stream that was open, a 503 for one that was not."""
    if answer.status_code == 200:
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
        event = answer.text.split("\n\n")[-3]
        assert '"error"' in event and '"engine_dead"' in event and word in event, event
    else:
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "engine_dead" and word in answer.text


async def name_of(http: httpx.AsyncClient) -> str:
    name = (await http.get("/v1/models")).json()["data"][0]["id"]
    assert isinstance(name, str)
    return name


async def until_running(client: AsyncClient, live: int, running: int) -> None:
    for _ in range(200):
        seen = await client.requests()
        if (len(seen["requests"]), seen["running"]) == (live, running):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(seen)


@pytest.mark.parametrize("role", [*ENGINE, "gateway"])
async def test_a_killed_process_ends_the_engine(
    tmp_path: Path, script: Callable[..., str], role: str
) -> None:
    """Within seconds, by its death alone; and the command says who it was."""
    front = f"ipc://{tmp_path}/front"
    with Served(
        tmp_path, "--model", slow_script(script), "--zmq-front", front, "--stall-seconds", NEVER
    ) as served:
        url = await asyncio.to_thread(served.wait_ready)
        children = served.children()
        assert sorted(children) == sorted([*ENGINE, "gateway"])
        client = await AsyncClient.connect(front, stall_seconds=float(NEVER))
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            over_http = asyncio.create_task(stream(http, await name_of(http)))
            over_zmq = asyncio.create_task(client.generate("x", GREEDY))
            await until_running(client, 2, 2)
            killed = time.monotonic()
            children[role].kill()
            if role == "gateway":
                with pytest.raises(httpx.TransportError):
                    await over_http
            else:
                check_error(await over_http, f"{role} process died")
            if role != "tokenizer":  # without it nobody could tell a ZMQ client
                with pytest.raises(EngineDead, match=f"{role} process died"):
                    await over_zmq
            assert time.monotonic() - killed < 5  # about 1 on a machine that is not busy
            code, errors = await asyncio.to_thread(served.end)
        over_zmq.cancel()
        await asyncio.gather(over_zmq, return_exceptions=True)
        await client.close()
        assert code == 1, errors
        assert f"{role} ended with code -9" in errors and f"the {role} process died" in errors
        assert not [child for child in children.values() if child.is_running()]
        assert not served.leftovers()
        assert role == "tokenizer" or not (tmp_path / "front").exists()


@pytest.mark.parametrize("role", ["scheduler", "tokenizer"])
async def test_a_death_while_draining_is_no_clean_end(
    tmp_path: Path, script: Callable[..., str], role: str
) -> None:
    with Served(tmp_path, "--model", slow_script(script), "--stall-seconds", NEVER) as served:
        url = await asyncio.to_thread(served.wait_ready)
        children = served.children()
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            name = await name_of(http)
            running = asyncio.create_task(stream(http, name))
            await asyncio.sleep(0.3)
            served.process.send_signal(signal.SIGTERM)
            while "shutting_down" not in (await http.get("/ready")).text:
                await asyncio.sleep(0.02)
            assert not running.done()
            children[role].kill()
            check_error(await running, f"{role} process died")
            code, errors = await asyncio.to_thread(served.end)
        assert code == 1, errors
        assert f"the {role} process died while draining" in errors
        assert not [child for child in children.values() if child.is_running()]
        assert not served.leftovers()


async def test_a_killed_supervisor_takes_its_children_along(
    tmp_path: Path, script: Callable[..., str]
) -> None:
    with Served(tmp_path, "--model", slow_script(script)) as served:
        url = await asyncio.to_thread(served.wait_ready)
        children = list(served.children().values())
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            running = asyncio.create_task(stream(http, await name_of(http)))
            await asyncio.sleep(0.3)
            served.process.kill()
            answer = await running  # it is told, whichever way it comes
            assert '"shutting_down"' in answer.text or answer.text.count('"text"') >= 200
        code, errors = await asyncio.to_thread(served.end)
        assert code == -signal.SIGKILL
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 15)
        assert not alive, errors
        assert not served.leftovers(), errors


@asynccontextmanager
async def three_live_two_queued(processes: RunEngine, model: str, stall_seconds: float):
    """Five HTTP streams of an engine that runs three at once."""
    async with processes(model=model, max_running=3, stall_seconds=stall_seconds) as running:
        async with running.http() as http:
            name = await name_of(http)
            streams = [asyncio.create_task(stream(http, name)) for _ in range(5)]
            await until_running(running.client, 5, 3)
            yield running, http, name, streams


async def check_refusal(http: httpx.AsyncClient, name: str) -> None:
    for path in ("/health", "/ready"):
        answer = await http.get(path)
        assert answer.status_code == 503, (path, answer.text)
    answer = await http.post("/v1/completions", json={"model": name, "prompt": "x"})
    assert answer.status_code == 503, answer.text


@pytest.mark.parametrize("role", ENGINE)
async def test_killed_with_streams_live_and_queued(
    processes: RunEngine, script: Callable[..., str], role: str
) -> None:
    case = three_live_two_queued(processes, slow_script(script), float(NEVER))
    async with case as (running, http, name, streams):
        assert running.supervisor is not None
        os.kill(running.pids[role], signal.SIGKILL)
        assert await asyncio.to_thread(running.supervisor.watch, 10.0) == role
        running.supervisor.announce_death(role)
        for task in streams:
            check_error(await task, f"{role} process died")
        await check_refusal(http, name)


@pytest.mark.parametrize("role", ENGINE)
async def test_frozen_with_streams_live_and_queued(
    processes: RunEngine, script: Callable[..., str], role: str
) -> None:
    async with three_live_two_queued(processes, slow_script(script), 1.5) as case:
        running, http, name, streams = case
        os.kill(running.pids[role], signal.SIGSTOP)
        try:
            for task in streams:
                check_error(await task, "engine has")
            await check_refusal(http, name)
            if role != "tokenizer":
                with pytest.raises(EngineDead):
                    await running.client.generate("x", GREEDY)
        finally:
            os.kill(running.pids[role], signal.SIGCONT)
        await recovers(running, http, name)


async def recovers(running: Running, http: httpx.AsyncClient, name: str) -> None:
    """It wakes up and everything is as before."""
    for _ in range(100):
        if (await http.get("/health")).status_code == 200:
            break
        await asyncio.sleep(0.05)
    few = SamplingParams(temperature=0.0, max_tokens=20)
    assert (await running.client.generate("x", few)).text == "ab" * 10
    assert '"length"' in (await stream(http, name, 20)).text
    await running.settle()


async def test_a_frozen_tokenizer_is_noticed_by_its_clients(
    processes: RunEngine, script: Callable[..., str]
) -> None:
    async with processes(model=slow_script(script)) as running:
        client = await AsyncClient.connect(running.front, stall_seconds=1.0)
        task = asyncio.create_task(client.generate("x", GREEDY))
        await asyncio.sleep(0.3)
        os.kill(running.pids["tokenizer"], signal.SIGSTOP)
        try:
            with pytest.raises(EngineDead):
                await task
        finally:
            os.kill(running.pids["tokenizer"], signal.SIGCONT)
        await client.close()
        await running.settle()
