"""Requests that must be refused, and hurt nobody: empty prompts, biases on tokens that are not there,
bytes that are no JSON. Each kind of fault ended an engine somewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from srt.client import SamplingParams
from srt.errors import InvalidRequest, ProtocolError
from tests.process.case_rig import JSON, Caller, balance, neighbour, probe
from tests.process.conftest import Running, run_inline, run_processes, write_script

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORDS = ["tick ", "pong", "ok"]
TICK, PONG, OK = 256, 257, 258
VOCAB = 256 + len(WORDS) + 1
LONG = "tick " * 150


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processes", "inline"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    folder: Path = tmp_path_factory.mktemp("requests") / "script"
    model = write_script(
        folder,
        WORDS,
        [OK],
        scripts={"neighbour": [TICK] * 150, "ping": [PONG]},
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
        step_seconds=0.002,
    )
    run = run_processes if request.param == "processes" else run_inline
    async with run(model=model, max_body_mb=4.0) as engine:
        yield engine


async def refused(running: Running, path: str, body: dict[str, Any], *words: str) -> None:
    async with running.http() as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400, (body, answer.status_code, answer.text)
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    for word in words:
        assert word in (error["param"] or ""), (body, error)


async def test_empty_prompts_are_refused(running: Running) -> None:
    user = {"role": "user", "content": ""}
    async with neighbour(running, "neighbour", LONG):
        for body in (
            {"prompt": ""},
            {"prompt": []},
            {"prompt": [""]},
            {"prompt": ["", "x"]},
            {"prompt": ["x", ""]},
            {"prompt": [[]]},
            {"prompt": [[65], []]},
            {"prompt": "", "stream": True},
            {"prompt": "", "echo": True, "max_tokens": 0},
        ):
            await refused(running, "/v1/completions", body, "prompt")
        for messages in ([user], [user, {"role": "assistant", "content": ""}, user]):
            for is_streamed in (False, True):
                body = {"messages": messages, "stream": is_streamed}
                await refused(running, "/v1/chat/completions", body)
        await refused(running, "/v1/chat/completions", {"messages": []}, "messages")
        for body in ({"prompt": ""}, {"token_ids": []}, {"messages": [user]}, {"prompt": None}):
            await refused(running, "/generate", body)
        for prompt in ("", [], [{"role": "user", "content": ""}]):
            with pytest.raises(InvalidRequest):
                await running.client.generate(prompt)
        async with running.http() as http:  # no tokens is an answer where nothing is generated
            answer = await http.post("/tokenize", json={"prompt": ""})
            assert (answer.status_code, answer.json()["tokens"]) == (200, [])
            answer = await http.post("/detokenize", json={"token_ids": []})
            assert (answer.status_code, answer.json()["text"]) == (200, "")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_a_bias_needs_a_token_that_exists(running: Running, path: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    start: dict[str, Any] = {"messages": messages} if "chat" in path else {"prompt": "x"}
    start |= {"max_tokens": 2, "temperature": 0}
    bad = ("-1", str(VOCAB), "999999999", str(2**31), str(2**64), "seven", "1.5", "", " 1", "+1")
    async with neighbour(running, "neighbour", LONG):
        for key in (*bad, "1e2", "٣", "1\n"):
            await refused(running, path, {**start, "logit_bias": {key: 1}}, f"logit_bias.{key}")
        for value in (1e9, -100.5, None, "1", True, [1], {}):
            body = {**start, "logit_bias": {"65": value}}
            await refused(running, path, body, "logit_bias.65")
        for whole in ([], "65", 65, [[65, 1]]):
            await refused(running, path, {**start, "logit_bias": whole}, "logit_bias")
        many = {str(token): 1 for token in range(2000)}
        await refused(running, path, {**start, "logit_bias": many}, "logit_bias")
        async with running.http() as http:
            for good in ({str(VOCAB - 1): 100}, {"0": -100}, {"007": 1.0}, {}, None):
                answer = await http.post(path, json={**start, "logit_bias": good})
                assert answer.status_code == 200, answer.text


async def test_the_library_refuses_the_same_biases(running: Running) -> None:
    async with neighbour(running, "neighbour", LONG):
        for bias in (
            {-1: 1.0},
            {VOCAB: 1.0},
            {2**31: 1.0},
            {65: 1e9},
            {65: float("nan")},
            {65: float("-inf")},
        ):
            with pytest.raises(InvalidRequest) as caught:
                await running.client.generate("x", SamplingParams(logit_bias=bias))
            assert caught.value.param == f"logit_bias.{next(iter(bias))}"
        for wrong in ({2**64: 1.0}, {"seven": 1.0}, {1.5: 1.0}, {65: "x"}, {65: None}):
            with pytest.raises((InvalidRequest, ProtocolError)):  # not even the right types
                params = SamplingParams(logit_bias=wrong)  # type: ignore[arg-type]
                await running.client.generate("x", params)
        favourite = SamplingParams(temperature=0.0, max_tokens=1, logit_bias={OK: -100.0})
        assert (await running.client.generate("x", favourite)).text != "ok"


BROKEN = {
    "cut_character": b'{"prompt":"\xc3("}',
    "gbk": b'{"prompt":"' + "你好".encode("gbk") + b'"}',
    "latin": b'{"prompt":"caf\xe9"}',
    "overlong": b'{"prompt":"\xc0\xaf"}',
    "raw_surrogate": b'{"prompt":"\xed\xa0\x80"}',
    "lone_surrogate": b'{"prompt":"\\ud800"}',
    "bad_key": b'{"\xff":1,"prompt":"x"}',
    "utf16": '{"prompt":"x"}'.encode("utf-16"),
    "utf16_no_mark": '{"prompt":"x"}'.encode("utf-16-le"),
    "utf8_mark": b'\xef\xbb\xbf{"prompt":"x"',
    "truncated": b'{"prompt":"',
    "empty": b"",
    "nul": b"\x00" * 64,
    "space": b" \n ",
    "deep_list": b"[" * 1_000_000,
    "deep_object": b'{"a":' * 200_000,
    "deep_value": b'{"prompt":"x","metadata":' + b"[" * 2_000 + b"]" * 2_000 + b"}",
    "list": b"[]",
    "string": b'"prompt"',
    "null": b"null",
    "number": b"1",
    "nan": b'{"prompt":"x","temperature":NaN}',
    "twice": b'{"prompt":"x"}{"prompt":"x"}',
    "huge_number": b'{"prompt":"x","max_tokens":' + b"9" * 100_000 + b"}",
    "control": b'{"prompt":"a\x01b"}',
}


async def test_bodies_that_are_no_json(running: Running) -> None:
    async with neighbour(running, "neighbour", LONG), running.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"):
            for name, body in BROKEN.items():
                if "chat" in path:
                    body = body.replace(b'"prompt":"x"', b'"messages":[{"role":"user"}]')
                answer = await http.post(path, content=body, headers=JSON)
                assert 400 <= answer.status_code < 500, (path, name, answer.status_code)
                answer.content.decode("utf-8")
                assert answer.json()["error"]["message"], (path, name)


async def test_what_the_headers_claim(running: Running) -> None:
    body = b'{"prompt":"x","max_tokens":1}'
    claims = {
        "application/json; charset=utf-16": 415,
        "application/json; charset=latin-1": 415,
        "text/plain": 415,
        "multipart/form-data; boundary=x": 415,
        "application/json; charset=UTF-8": 200,
        'application/json; charset="utf8"': 200,
    }
    async with neighbour(running, "neighbour", LONG), running.http() as http:
        for claim, status in claims.items():
            headers = {"content-type": claim}
            answer = await http.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == status, (claim, answer.text)
        for encoding in ("gzip", "br", "identity, gzip"):
            headers = {**JSON, "content-encoding": encoding}
            answer = await http.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == 415, (encoding, answer.text)
        names = {b"x-request-id": b"\xff\xfe"}
        answer = await http.post("/v1/completions", content=body, headers={**JSON, **names})  # type: ignore[dict-item]
        assert answer.status_code in (200, 400)


async def test_bodies_past_the_limit(running: Running) -> None:
    """80 MB announced, 80 MB sent without a word, and 2 MB whose prompt is too long."""

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"prompt":"'
        for _ in range(80):
            yield b"x" * 1_000_000
            await asyncio.sleep(0)
        yield b'"}'

    async with neighbour(running, "neighbour", LONG), running.http() as http:
        huge = b'{"prompt":"' + b"x" * 80_000_000 + b'"}'
        for body in (huge, parts()):
            answer = await http.post("/v1/completions", content=body, headers=JSON)
            assert answer.status_code == 413, answer.text
            assert answer.json()["error"]["code"] == "request_too_large"
        caller = await Caller.post(running.url, "/generate", b"{", **{"Content-Length": "9" * 30})
        head = await caller.read_until(b"\r\n")
        assert head.split()[1][:1] == b"4", head
        await caller.cut()
        long = await http.post("/v1/completions", json={"prompt": "x" * 2_000_000})
        assert long.status_code == 400
        assert long.json()["error"]["code"] == "context_length_exceeded"


async def test_bodies_that_never_end(running: Running) -> None:
    """A caller that stops in the middle of its body keeps its own socket and nothing else."""
    async with neighbour(running, "neighbour", LONG):
        stuck = [
            await Caller.post(running.url, "/v1/completions", b'{"prom', **{"Content-Length": "99"})
            for _ in range(20)
        ]
        await probe(running)
        for number, caller in enumerate(stuck):
            await caller.cut(reset=bool(number % 2))
    await balance(running)
