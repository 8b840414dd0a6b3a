"""The edges of HTTP through whole engines: values of both logprob modes, ranked samples, limits that are
flags, requests that never arrive, and an engine that is dead."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from srt.client import SamplingParams
from srt.errors import InvalidRequest
from tests.process.case_rig import both_ways, probe
from tests.process.conftest import RunEngine, Running

Script = Callable[..., str]
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"


async def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_logprobs_of_both_modes(engine: RunEngine, script: Script) -> None:
    async with engine(model=script(["a", "b"])) as running:
        await both_modes(running)


async def both_modes(running: Running) -> None:
    async with running.http() as http:
        body = {"prompt": "x", "max_tokens": 2, "temperature": 0, "logprobs": 2}
        raw = (await http.post(TEXT, json={**body, "logprobs_mode": "raw"})).json()["choices"]
        assert (await http.post(TEXT, json=body)).json()["choices"] == raw
        assert all(-9 < value < -1e-4 for value in raw[0]["logprobs"]["token_logprobs"])
        drawn = (await http.post(TEXT, json={**body, "logprobs_mode": "processed"})).json()
        logprobs = drawn["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [0.0, 0.0]
        assert [min(top.values()) for top in logprobs["top_logprobs"]] == [-9999.0] * 2
        other = await error_of(await http.post(TEXT, json={**body, "logprobs_mode": "cooked"}))
        assert other["param"] == "logprobs_mode" and "processed" in other["message"]
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=1, logprobs_mode="processed")
    [sample] = (await running.client.generate("x", params)).samples
    assert sample.logprobs is not None and sample.logprobs[0].chosen.logprob == 0.0
    with pytest.raises(InvalidRequest, match="logprobs_mode"):
        wrong: Any = "cooked"
        await running.client.generate("x", SamplingParams(logprobs_mode=wrong))
    await running.settle()


async def test_patterns_stop_a_text(engine: RunEngine, script: Script) -> None:
    """At the first character that completes one, wherever the tokens cut; the scheduler is told."""
    words = ["one", "\n", "\nAct", "ion 12", "34: x", " y"]
    async with engine(model=script(words, step_seconds=0.01)) as running, running.http() as http:
        body = {"prompt": "x", "temperature": 0, "stop_regex": r"\n+Action \d{3}"}
        text, reason = await both_ways(http, body)
        assert (text, reason) == ("one", "stop")
        more = {"include_stop_str_in_output": True, "tandem": {"stop": True}, "stop": ["4"]}
        answer = (await http.post(TEXT, json={**body, **more})).json()
        assert answer["choices"][0]["text"] == "one\n\nAction 123"
        assert answer["tandem"]["choices"][0]["matched_stop"] == body["stop_regex"]
        assert answer["usage"]["completion_tokens"] == 5
        assert (await both_ways(http, {**body, "min_tokens": 5}))[0] == "".join(words)
        for patterns, word in (
            ("^a", "place"),
            (["a", "(b"], "[1]"),
            (["a{200}"] * 20, "together"),
        ):
            error = await error_of(await http.post(TEXT, json={**body, "stop_regex": patterns}))
            assert error["param"].startswith("stop_regex"), error
            assert word in error["message"] or "connections" in error["message"], error
        params = SamplingParams(temperature=0, stop_regex=["[no]e?"])
        assert (await running.client.generate("x", params)).text == ""
        await running.settle()


async def test_samples_are_ranked_and_counted(engine: RunEngine, script: Script) -> None:
    async with engine(model=script(["a", "b", "c"])) as running, running.http() as http:
        body = {"prompt": ["x", "y"], "temperature": 0, "max_tokens": 9, "n": 2, "best_of": 4}
        answer = (await http.post(TEXT, json=body)).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert {choice["text"] for choice in answer["choices"]} == {"abc"}
        assert answer["usage"]["completion_tokens"] == 2 * 4 * 4
        assert answer["usage"]["prompt_tokens"] == 2
        for more in ({"stream": True}, {"n": 5}):
            error = await error_of(await http.post(TEXT, json={**body, **more}))
            assert error["param"] == "best_of"
        await running.settle()


async def test_limits_are_flags_and_errors_name_them(engine: RunEngine, script: Script) -> None:
    model = script(["pong"], chat_template=TEMPLATE)
    limits: dict[str, Any] = {
        "max_messages": 2, "max_name_chars": 64, "max_stop_token_ids": 1, "max_prompts": 2,
        "max_n": 2, "max_stop": 1, "max_stop_chars": 3, "max_logit_bias": 1, "max_logprobs": 1,
        "max_prompt_chars": 50, "max_grammar_chars": 20,
    }  # fmt: skip
    turn = {"role": "user", "content": "hi"}
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        (CHAT, "max-messages", {"messages": [turn] * 3}),
        (CHAT, "max-logprobs", {"messages": [turn], "logprobs": True, "top_logprobs": 2}),
        (TEXT, "max-name-chars", {"cache_salt": "x" * 65}),
        (TEXT, "max-stop-token-ids", {"stop_token_ids": [1, 2]}),
        (TEXT, "max-prompts", {"prompt": ["a", "b", "c"]}),
        (TEXT, "max-n", {"n": 3}),
        (TEXT, "max-stop", {"stop": ["a", "b"]}),
        (TEXT, "max-stop-chars", {"stop": "abcd"}),
        (TEXT, "max-logit-bias", {"logit_bias": {"1": 1, "2": 1}}),
        (TEXT, "max-grammar-chars", {"regex": "a" * 21}),
        (TEXT, "max-prompt-chars", {"prompt": "x" * 51}),
    ]
    async with engine(model=model, **limits) as running, running.http() as http:
        for path, flag, fields in bodies:
            body = fields if path == CHAT else {"prompt": "x", **fields}
            answer = await http.post(path, json=body)
            status = 413 if flag == "max-prompt-chars" else 400
            error = await error_of(answer, status)
            assert f"--{flag})" in error["message"], error
        settings = (await http.get("/v1/engine/config")).text
        for name in limits:
            assert f'"{name}"' in settings
        nobody = [turn, {"role": "assistant", "content": None}]
        answer = await http.post(CHAT, json={"messages": nobody, "temperature": 0})
        assert answer.json()["choices"][0]["message"]["content"] == "pong"
        await probe(running)
        await running.settle()


async def test_a_request_that_never_arrives_ends(engine: RunEngine, script: Script) -> None:
    async with engine(model=script(["pong"]), receive_seconds=0.2) as running:
        host, _, port = running.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n"
        writer.write(head.encode() + b'{"prompt": ')
        head_bytes, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        writer.close()
        assert head_bytes.startswith(b"HTTP/1.1 408 ")
        error = json.loads(body)["error"]
        assert error["code"] == "timeout" and "--receive-seconds" in error["message"]
        await probe(running)
        await running.settle()


async def test_a_misspelt_schema_is_refused_with_its_place(
    engine: RunEngine, script: Script
) -> None:
    async with engine(model=script(["pong"])) as running, running.http() as http:
        schema = {"type": "object", "properties": {"a": {"type": "integer", "minimun": 1}}}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        answer = await http.post(TEXT, json={"prompt": "x", "response_format": form})
        error = await error_of(answer)
        assert (error["code"], error["param"]) == ("invalid_schema", "response_format")
        assert "minimun at #/properties/a" in error["message"] and "minimum" in error["message"]
        await running.settle()


@pytest.mark.parametrize("role", ["scheduler", "tokenizer", "detokenizer"])
async def test_a_dead_process_is_unhealthy_at_once(
    processes: RunEngine, script: Script, role: str
) -> None:
    """Long before the stall time: whoever watches the processes says so."""
    async with processes(model=script(["pong"]), stall_seconds=1000.0) as running:
        async with running.http() as http:
            assert (await http.get("/health_generate")).status_code == 200
            assert (await http.post(TEXT, json={"prompt": "x"})).status_code == 200
            assert running.supervisor is not None
            os.kill(running.pids[role], signal.SIGKILL)
            assert await asyncio.to_thread(running.supervisor.watch, 20) == role
            running.supervisor.announce_death(role)
            for _ in range(400):
                answer = await http.get("/health")
                if answer.status_code == 503:
                    break
                await asyncio.sleep(0.01)
            error = await error_of(answer, 503)
            assert error["code"] == "engine_dead" and role in error["message"]
            assert answer.headers["retry-after"]
            for path in ("/ready", "/health_generate"):
                assert (await http.get(path)).status_code == 503
            refused = await error_of(await http.post(TEXT, json={"prompt": "x"}), 503)
            assert role in refused["message"]
