"""`tandem bench` as a user runs it, against whole engines with a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.start import main as measure_starts
from srt.cli.main import main
from tests.process.conftest import ROLES, RunEngine, Running

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest_asyncio.fixture
async def running(processes: RunEngine, script: Callable[..., str]) -> AsyncIterator[Running]:
    model = script(["a", "b", "c"], script=[256, 257, 258] * 60, context_length=2048)
    template = Path(model) / "template.jinja"
    template.write_text(CHAT)
    async with processes(
        model=model, served_model_name="scripted", chat_template=str(template)
    ) as engine:
        yield engine
        await engine.settle()


async def bench(*flags: str) -> int:
    return await asyncio.to_thread(main, ["bench", *flags])


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_over_http_and_over_zmq(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over_http, over_zmq, picture = (tmp_path / name for name in ("http", "zmq", "load.png"))
    what = ("--words", "30", "--max-tokens", "12", "--exact", "--seed", "5")
    goals = ("--goal-ttft", "30", "--goal-tpot", "0.000000001")
    http = ("--url", running.url, "--model", "scripted", "--plot", str(picture))
    load = ("--count", "6", "--concurrency", "1", "3", *goals)
    assert await bench(*http, *what, *load, "--out", str(over_http)) == 0
    zmq = ("--zmq", running.front, "--profile-step")
    assert await bench(*zmq, *what, *load, "--out", str(over_zmq)) == 0
    printed = capsys.readouterr().out
    assert "goodput 0.0 requests/s" in printed  # no token comes within a nanosecond
    assert "where a step's time went" in printed and "decode" in printed

    results = read_results(over_http), read_results(over_zmq)
    for lines in results:
        assert [line["load"] for line in lines] == [{"concurrency": 1}, {"concurrency": 3}]
        for line in lines:
            summary = line["summary"]
            assert (summary["requests"], summary["failed"]) == (6, 0), summary["errors"]
            assert summary["input_tokens"] == 6 * 30  # exactly, whatever a word is to the model
            assert summary["output_tokens"] == 6 * 12
            assert summary["goodput_per_s"] == 0.0 and summary["goals_s"]["ttft"] == 30
            assert summary["ttft_ms"]["p50"] > 0 and summary["client_queue_ms"]["max"] >= 0
            assert line["engine"]["bags"]["model"]["served_model_name"] == "scripted"
            assert line["engine"]["versions"] and line["engine"]["config_hash"]
            assert line["machine"]["cpu"] and line["machine"]["python"]
            assert line["exact"] is True and line["workload"]["seed"] in (5, 6)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert all(json.loads(line) in [*results[0], *results[1]] for line in json_lines(printed))

    assert await bench("--compare", str(over_http), str(over_zmq)) == 0
    table = capsys.readouterr().out
    for figure in ("output_tok_per_s", "client_queue_ms p99", "goodput_per_s"):
        assert table.count(figure) == 2, table  # once for each load


def json_lines(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("{")]
    assert len(lines) == 4
    return lines


async def test_a_cold_cache_and_a_warm_one(running: Running, tmp_path: Path) -> None:
    """Two groups of three behind prefixes of 1,000 tokens: cold, four of six find theirs; warm, all.
    The second round starts cold again, though the same server was warm before."""
    scenario = tmp_path / "prefix.toml"
    scenario.write_text(
        'exact = true\ncache = "pair"\nrepeat = 2\n[workload]\nkind = "shared-prefix"\n'
        "groups = 2\nper_group = 3\nprefix_words = 1000\nwords = 20\nmax_tokens = 4\nseed = 1\n"
        "[[loads]]\nconcurrency = 1\n"
    )
    for where in (("--url", running.url, "--model", "scripted"), ("--zmq", running.front)):
        out = tmp_path / where[0]
        assert await bench(*where, "--scenario", str(scenario), "--out", str(out)) == 0
        results = read_results(out)
        assert [line["cache"] for line in results] == ["cold", "warm"] * 2
        for line in results:
            assert line["summary"]["input_tokens"] == 6 * 1020
            expected = 4 / 6 if line["cache"] == "cold" else 1.0
            assert line["summary"]["cache_hit_rate"] == pytest.approx(expected, abs=0.02)


async def test_chats_and_arrivals_at_a_rate_and_failures(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    what = ("--kind", "multi-turn", "--count", "8", "--words", "5", "--max-tokens", "3")
    for where in (("--url", running.url, "--model", "scripted"), ("--zmq", running.front)):
        assert await bench(*where, *what, "--rate", "20", "--seed", "2", "--out", str(out)) == 0
    http, zmq = (line["summary"] for line in read_results(out))
    assert http["requests"] == zmq["requests"] == 8
    assert http["input_tokens"] == zmq["input_tokens"]
    assert http["output_tokens"] == zmq["output_tokens"] == 24
    # a wrong model name over HTTP, a prompt past the context over ZMQ
    assert await bench("--url", running.url, "--model", "other", "--count", "2") == 1
    assert "2 requests, 2 failed" in capsys.readouterr().out
    assert await bench("--zmq", running.front, "--words", "3000", "--count", "1") == 1
    assert "1 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--zmq"),
        (("--url", "http://127.0.0.1:9", "--profile-step"), "--zmq"),
        (("--url", "https://127.0.0.1:9"), "http://HOST:PORT"),
        (("--url", "http://127.0.0.1:9", "--cache", "cold"), "/flush_cache"),
        (("--url", "http://127.0.0.1:9", "--exact"), "/tokenize"),
        (("--url", "http://127.0.0.1:9", "--kind", "trace"), "--trace"),
    ],
)
async def test_what_cannot_be_measured_says_why(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await bench(*flags) == 2
    assert said in capsys.readouterr().err


async def test_a_server_that_is_not_there_is_an_error_and_no_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await bench("--url", "http://127.0.0.1:9", "--count", "2") == 1
    said = capsys.readouterr().out
    title, count, error = said.splitlines()
    assert count == "  2 requests, 2 failed" and "ConnectionRefused" in error
    assert "ttft" not in said and "{" not in said


async def test_starts_are_timed_and_memory_is_added_up(
    script: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = script(["a", "b"], script=[256, 257] * 40)
    flags = ["--times", "1", "--streams", "4", "--model", model, "--log-level", "error"]
    assert await asyncio.to_thread(measure_starts, flags) == 0
    table, line = capsys.readouterr().out.splitlines()
    assert all(role in table for role in (*ROLES, "serve"))
    result = json.loads(line)
    [seconds], [peak] = result["ready_s"], result["peak_mb"]
    assert seconds > 0 and peak > 5 * 10  # five processes with an interpreter in each
