"""The names of requests: one name is found in the answer, in the gateway's log and in the scheduler's,
and a name that is used twice belongs to its first user alone."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.process.case_rig import Caller, balance, neighbour, probe, stream
from tests.process.conftest import RunEngine, Running

Script = Callable[..., str]
TEXT = "/v1/completions"
ANSWERS = {"one": [256] * 200, "two": [257] * 200, "ping": [258], "neighbour": [256] * 100}
WORDS = ["a", "b", "pong"]
LATE = {"prompt": "one", "max_tokens": 200, "temperature": 0}


class Log:
    """All that the engine's processes have logged. In one process `caplog` has it."""

    def __init__(self, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
        self._capfd = capfd
        self._caplog = caplog
        self._text = ""

    async def lines(self, name: str, *words: str) -> list[str]:
        """The lines that name a request, as soon as there is one with each of the words."""
        for _ in range(400):
            captured = self._capfd.readouterr()
            self._text += captured.out + captured.err
            records = [f"{r.name}: {r.getMessage()}" for r in self._caplog.records]
            lines = [line for line in self._text.splitlines() + records if name in line]
            if all(any(word in line for line in lines) for word in words):
                return lines
            await asyncio.sleep(0.01)
        raise AssertionError(f"{words} are not all in {lines}")


@pytest.fixture
def log(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Log:
    for name in ("srt", "tokenizer_proc"):
        caplog.set_level(logging.DEBUG, logger=name)
    return Log(capfd, caplog)


async def test_one_name_is_everywhere(engine: RunEngine, script: Script, log: Log) -> None:
    model = script(WORDS, scripts=ANSWERS)
    async with engine(model=model, log_level="debug") as running, running.http() as http:

        async def send(headers: dict[str, str], **fields: Any) -> httpx.Response:
            body = {"prompt": "one", "max_tokens": 3, "temperature": 0, **fields}
            return await http.post(TEXT, json=body, headers=headers)

        cases: list[tuple[dict[str, str], dict[str, Any]]] = [
            ({}, {}),
            ({"x-request-id": "given-1"}, {}),
            ({"x-request-id": "given-2"}, {"stream": True}),
            ({}, {"request_id": "chosen-1"}),
            ({"x-request-id": "given-3"}, {"request_id": "chosen-2"}),
            ({"x-request-id": "given-4"}, {"prompt": ["one", "two"]}),
        ]
        for headers, fields in cases:
            answer = await send(headers, **fields)
            assert answer.status_code == 200, answer.text
            name = answer.headers["x-request-id"]
            assert name == headers.get("x-request-id", fields.get("request_id", name))
            [access, *_] = [
                line
                for line in await log.lines(name, "srt.gateway.edge")
                if "srt.gateway.edge" in line
            ]
            assert access.endswith(f"{TEXT} 200")
            found = re.search(r"\((\S+)\): /v1", access)
            inside = found[1] if found else name  # what the engine calls it
            assert inside.startswith(fields.get("request_id", name))
            for line in await log.lines(inside, "srt.scheduler.finish"):
                if "srt.scheduler.finish" in line:
                    assert "ended: length, 3 prompt + 3 generated" in line


async def test_errors_are_named_too(engine: RunEngine, script: Script, log: Log) -> None:
    model = script(WORDS, scripts=ANSWERS, step_seconds=0.01)
    async with engine(
        model=model,
        log_level="debug",
        max_body_mb=0.01,
        receive_seconds=0.3,
        max_running=1,
        max_queued=7,
    ) as running:
        async with running.http() as http:
            cases: list[tuple[str, int, dict[str, Any], tuple[str, ...]]] = [
                (TEXT, 400, {"prompt": "one", "top_p": 7}, ()),
                (TEXT, 400, {"prompt": "x" * 600}, ("tokenizer_proc.tokenizer",)),
                (TEXT, 404, {"prompt": "one", "model": "other"}, ()),
                ("/nothing", 404, {}, ()),
                (TEXT, 413, {"prompt": "x" * 20_000}, ()),
                (TEXT, 408, {**LATE, "deadline": 0.03}, ("srt.scheduler.finish",)),
                (TEXT, 429, {**LATE, "prompt": ["one"] * 9}, ("srt.scheduler.finish",)),
            ]
            for number, (path, status, fields, where) in enumerate(cases):
                name = f"bad-{number}"
                answer = await http.post(path, json=fields, headers={"x-request-id": name})
                assert answer.status_code == status, answer.text
                await log.lines(name, "srt.gateway.edge", *where)
                assert answer.headers["x-request-id"] == name and answer.json()["error"]["message"]
        head = {"x-request-id": "late", "Content-Length": "1000"}
        caller = await Caller.post(running.url, TEXT, b'{"prompt": ', **head)
        answered = await caller.reader.read()
        await caller.cut()
        assert b"HTTP/1.1 408" in answered and b"x-request-id: late\r\n" in answered
        await log.lines("late", "srt.gateway.connection", "did not arrive")
        await balance(running)


# --- H6: one name for two live requests ---------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "whole"])
async def test_h6_a_name_that_is_used_twice(
    engine: RunEngine, script: Script, is_streamed: bool
) -> None:
    model = script(WORDS, scripts=ANSWERS, step_seconds=0.002)
    async with engine(model=model) as running, neighbour(running, "neighbour", "a" * 100):
        async with running.http() as http:
            for seconds in (0.05, 0.001, 0.0):
                first = asyncio.create_task(ask(http, "one", is_streamed))
                await asyncio.sleep(seconds)
                second = asyncio.create_task(ask(http, "two", is_streamed))
                texts = await first, await second
                # on two connections, who comes first is open if they start together
                assert texts in (("a" * 200, None), (None, "b" * 200))
                assert seconds < 0.05 or texts[0] is not None
            await reuse_after_abort(running, http)
        counts = (await running.client.metrics())["tandem_requests_finished_total"]["samples"]
        found = {labels["reason"]: count for labels, count in counts}
        assert (found["length"], found["abort"]) == (3, 5)


async def ask(http: httpx.AsyncClient, prompt: str, is_streamed: bool) -> str | None:
    """The text, or None if the name was refused."""
    body = {"prompt": prompt, "request_id": "dup", "temperature": 0, "max_tokens": 200}
    answer = await http.post(TEXT, json={**body, "stream": is_streamed})
    if answer.status_code == 409:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("duplicate_request", "request_id")
        return None
    if not is_streamed:
        text: str = answer.json()["choices"][0]["text"]
        return text
    return "".join(re.findall(r'"text":"(\w*)"', answer.text))


async def reuse_after_abort(running: Running, http: httpx.AsyncClient) -> None:
    """As soon as the aborted one has ended for its caller, the name is free. Before, it is refused."""
    for _ in range(5):
        body = {"prompt": "one", "request_id": "dup", "temperature": 0, "stream": True}
        caller = await Caller.post(running.url, TEXT, body)
        await caller.read_until(b'"text":"a')
        assert (await http.post("/abort", json={"request_id": "dup"})).json()["aborted"] == ["dup"]
        again = asyncio.create_task(
            http.post(TEXT, json={"prompt": "ping", "request_id": "dup", "temperature": 0})
        )
        rest = await caller.read_until(b"data: [DONE]")
        assert b'"code":"aborted"' in rest and b'"text":"b' not in rest
        answer = await again
        assert answer.status_code in (200, 409)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == "pong"
        await caller.cut()
        found = await stream(http, TEXT, {"prompt": "ping", "request_id": "dup", "temperature": 0})
        assert found.choices[0].text == "pong"
    await probe(running)
