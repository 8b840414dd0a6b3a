"""Constrained output through whole engines: what is valid, what is refused, and who is not disturbed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from srt.client import SamplingParams
from srt.errors import InvalidSchema
from srt.wire.params import Grammar
from tests.process.case_rig import balance, neighbour, probe, stream
from tests.process.conftest import Running, run_inline, run_processes, write_script

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORDS = ["tick ", "pong", '{"name": "', "Ann", '", "age": ', "41", "}", " and more", '"k"']
TICK, PONG = 256, 257
WRITTEN = [258, 259, 260, 261, 262, 263, 263]  # the schema cuts it before " and more"
LONG = "tick " * 150
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processes", "inline"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    folder: Path = tmp_path_factory.mktemp("structured") / "script"
    model = write_script(
        folder,
        WORDS,
        WRITTEN,
        scripts={"neighbour": [TICK] * 150, "ping": [PONG]},
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
        step_seconds=0.002,
    )
    run = run_processes if request.param == "processes" else run_inline
    async with run(model=model, max_grammar_chars=200_000) as engine:
        yield engine


def form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "who?"}], "temperature": 0, **fields}


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def refusal(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, (body, answer.status_code, answer.text)
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 400
    return error


@asynccontextmanager
async def answering(running: Running) -> AsyncIterator[None]:
    """Meanwhile the engine answers questions about its health: its event loops are not blocked."""
    num = 0
    stop = asyncio.Event()

    async def ask() -> None:
        nonlocal num
        while not stop.is_set():
            await running.client.health()
            num += 1
            await asyncio.sleep(0.002)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        stop.set()
        await asking
    assert num > 3


async def test_a_schema_shapes_the_answer(running: Running) -> None:
    async with running.http() as http:
        plain = await post(http, CHAT, chat(max_tokens=8))
        assert plain["choices"][0]["message"]["content"].endswith("} and more and more")
        for response_format in (
            form(SCHEMA), form(SCHEMA, strict=True), form(SCHEMA, strict=False, description="d"),
            {"type": "json_object"},
        ):  # fmt: skip
            body = chat(response_format=response_format, max_tokens=99)
            found = await post(http, CHAT, body)
            [choice] = found["choices"]
            assert choice["message"]["content"] == '{"name": "Ann", "age": 41}'
            assert choice["finish_reason"] == "stop"
            assert found["usage"]["completion_tokens"] == 5
            streamed = (await stream(http, CHAT, body)).choices[0]
            assert (streamed.text, streamed.reason) == ('{"name": "Ann", "age": 41}', "stop")
        text = await post(http, CHAT, chat(max_tokens=8, response_format={"type": "text"}))
        assert text["choices"][0]["message"] == plain["choices"][0]["message"]
    await balance(running)


async def test_it_goes_together_with_the_other_fields(running: Running) -> None:
    async with running.http() as http:
        body = chat(response_format=form(SCHEMA))
        cut = await post(http, CHAT, {**body, "max_tokens": 3})
        assert cut["choices"][0]["finish_reason"] == "length"
        stopped = await post(http, CHAT, {**body, "stop": ["age"]})
        assert stopped["choices"][0]["message"]["content"] == '{"name": "Ann", "'
        late = await post(http, CHAT, {**body, "min_tokens": 50, "max_tokens": 60})
        assert json.loads(late["choices"][0]["message"]["content"])["age"] == 41
        several = await post(http, CHAT, {**body, "n": 3, "logprobs": True, "top_logprobs": 2})
        assert len(several["choices"]) == 3
        for choice in several["choices"]:
            content = choice["logprobs"]["content"]
            assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
        other = await post(http, CHAT, {**body, "logit_bias": {"259": -100}, "max_tokens": 40})
        assert "Ann" not in other["choices"][0]["message"]["content"]
        everything = {str(token): -100 for token in range(256, 265)} | {"123": -100}
        error = await refusal(http, CHAT, {**body, "logit_bias": everything})
        assert error["param"] == "logit_bias" and "forbidden" in error["message"]
    await balance(running)
    await probe(running)


async def test_patterns_choices_and_grammars(running: Running) -> None:
    async with running.http() as http:
        for path in (TEXT, "/generate"):
            for fields, pattern in (
                ({"regex": "[a-c]{2}(pong|ping)"}, "[a-c]{2}(pong|ping)"),
                ({"choice": ["red", "green"]}, "red|green"),
                ({"grammar": 'start: "x" y\ny: "1" | "2"'}, "x[12]"),
            ):
                body = {"prompt": "p", "max_tokens": 30, "temperature": 0, **fields}
                [choice] = (await post(http, path, body))["choices"]
                assert re.fullmatch(pattern, choice["text"]), choice
                assert choice["finish_reason"] == "stop"
            one = {"prompt": "p", "regex": "a", "choice": ["a"]}
            assert "cannot be combined" in (await refusal(http, path, one))["message"]
            for field, value in (
                ("regex", "["), ("regex", ""), ("choice", []), ("choice", [1]),
                ("choice", "a"), ("grammar", "start: b"),
            ):  # fmt: skip
                error = await refusal(http, path, {"prompt": "p", field: value})
                assert error["param"].startswith(field), error
    await balance(running)


async def test_zmq_clients_have_it_too(running: Running) -> None:
    params = SamplingParams(
        temperature=0.0, grammar=Grammar(kind="json_schema", text=json.dumps(SCHEMA))
    )
    generation = await running.client.generate("who?", params)
    assert json.loads(generation.text) == {"name": "Ann", "age": 41}
    for text in ("{", '"{"', "[]"):
        with pytest.raises(InvalidSchema):
            grammar = Grammar(kind="json_schema", text=text)
            await running.client.generate("who?", SamplingParams(grammar=grammar))
    await balance(running)


async def test_h3_bad_schemas_hurt_nobody(running: Running) -> None:
    endless = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    async with neighbour(running, "neighbour", LONG), running.http() as http:
        for schema, word in (
            ({"type": "objekt"}, "objekt"),
            ({"type": "object", "properties": {"n": "int"}}, "schema"),
            ({"$ref": "#/nowhere"}, "nowhere"),
            ({"$ref": "#"}, "without end"),
            (endless, "without end"),
            ({"enum": []}, "empty"),
            ({"type": "array", "uniqueItems": True}, "uniqueItems"),
            ({"not": {"type": "null"}, "if": True}, "not"),
            ("{", "must be an object"),
            (json.dumps(SCHEMA), "must be an object"),
            (None, "missing"),
            (True, "must be an object"),
            ([], "must be an object"),
        ):
            error = await refusal(http, CHAT, chat(response_format=form(schema)))
            assert (error["param"], error["code"]) == ("response_format", "invalid_schema"), error
            assert word in error["message"], error
        for response_format in (
            "json_object", [], {}, {"type": "json"}, {"type": "json_schema"}, {"type": 7},
            {"type": "json_schema", "json_schema": "{}"}, {"type": "json_object", "schema": {}},
            form(SCHEMA, strict="yes"), form(SCHEMA, shema={}), form(SCHEMA, name=7),
        ):  # fmt: skip
            error = await refusal(http, CHAT, chat(response_format=response_format))
            assert error["param"] == "response_format", error


def nested(depth: int) -> Any:
    return {"type": "string"} if depth == 0 else {"anyOf": [nested(depth - 1)] * 4}


async def test_h4_hostile_grammars_hold_nobody_up(running: Running) -> None:
    """Each either ends in a refusal or gets its few tokens."""
    levels: dict[str, Any] = {"d0": {"type": "boolean"}}
    for depth in range(1, 13):
        levels[f"d{depth}"] = {"anyOf": [{"$ref": f"#/$defs/d{depth - 1}"}] * 4}
    bodies = [
        {"regex": "(x|y)*x(x|y){24}"},
        {"regex": "(([a-z]{1,80}){1,80}){1,80}"},
        {"regex": "(.*a.{20}){50}"},
        {"response_format": form({"$defs": levels, "$ref": "#/$defs/d12"})},
        {"response_format": form(nested(6))},
    ]
    async with neighbour(running, "neighbour", LONG), running.http() as http:
        async with answering(running):
            for body in bodies:
                answers = await asyncio.gather(
                    *(
                        http.post(TEXT, json={"prompt": f"h{i}", "max_tokens": 8, **body})
                        for i in range(3)
                    )
                )
                assert {answer.status_code for answer in answers} <= {200, 400}


async def test_h4_ten_in_a_row_leave_nothing(processes: Any, script: Any) -> None:
    model = script(WORDS, WRITTEN)
    async with processes(model=model) as engine, engine.http() as http:
        watched = [psutil.Process(engine.pids[role]) for role in ("scheduler", "tokenizer")]

        async def ten(first: int) -> list[int]:
            for number in range(first, first + 10):
                body = {"prompt": "p", "max_tokens": 20, "regex": f"(x|y)*x(x|y){{24}}{number}"}
                answer = await http.post(TEXT, json=body)
                assert answer.status_code in (200, 400), answer.text
            return [process.num_threads() for process in watched]

        threads = await ten(0)
        before = [process.memory_info().rss for process in watched]
        for first in range(10, 60, 10):
            assert await ten(first) == threads
        grown = [p.memory_info().rss - rss for p, rss in zip(watched, before, strict=True)]
        assert max(grown) < 100 * 2**20, grown
        await engine.settle()


async def test_too_long_is_refused_before_it_is_compiled(running: Running) -> None:
    async with running.http() as http:
        error = await refusal(http, TEXT, {"prompt": "p", "regex": "a" * 200_001})
        assert error["param"] == "regex" and "200000" in error["message"]


async def test_the_table_says_what_is_served(running: Running) -> None:
    async with running.http() as http:
        rows = (await http.get("/capabilities")).json()
    text = json.dumps(rows)
    for name in ("response_format", "regex", "choice", "grammar", "guided_json"):
        assert f'"{name}"' in text
