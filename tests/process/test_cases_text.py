"""From tokens to text, through the whole engine: stop strings, half characters, least lengths, usage.
Whatever is asked is asked twice, streamed and whole, and both must say the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from srt.client import SamplingParams
from tests.process.case_rig import balance, both_ways, neighbour, probe, stream
from tests.process.conftest import Running, run_inline, run_processes, write_script

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMPASS = "\N{COMPASS}"
BYTES = list(COMPASS.encode())
WORDS = [
    "go", " <<", "E", "ND>", ">more", "NT>", "x", "ab", "c", "xabc", "a\n", "\n", "b", "a",
    "\n\n", "a\n\nb", "d", "e", "f", "pong", "tick ", "<eos2>", "é", "one ", "two ",
]  # fmt: skip
EOS2, END = 256 + WORDS.index("<eos2>"), 256 + len(WORDS)
ENDS = {END, EOS2}


def ids(*pieces: str | int) -> list[int]:
    return [p if isinstance(p, int) else 256 + WORDS.index(p) for p in pieces]


SCRIPTS = {
    "neighbour": ids(*["tick "] * 400),
    "ping": ids("pong"),
    "marker": ids("go", " <<", "E", "ND>", ">more"),
    "near": ids("go", " <<", "E", "NT>"),
    "prefix": ids("x", "ab", "c", "d"),
    "one piece": ids("xabc", "d"),
    "newlines 1": ids("a\n", "\n", "b"),
    "newlines 2": ids("a", "\n\n"),
    "newlines 3": ids("a\n\nb"),
    "compass": BYTES,
    "compass and more": [*ids("a"), *BYTES, *ids("b")],
    "compasses": BYTES * 400,
    "torn": [*ids("a"), *BYTES[:2], *ids("b"), *BYTES[:3], 0xFF, *ids("c")],
    "lines": ids("a", "\n", "b", "\n", "c"),
    "seven b": ids("a", "b", "c", "d", "e"),  # 7 tokens: "s", "e", "v", "e", "n", " ", "b"
    "eos": ids("a", "b", END, "c", "d", "e", "f"),
    "eos2": ids("a", EOS2, "b", END, "c", "d", "e", "f"),
    "silent": ids("a", "<eos2>", "<eos2>", "b"),
}


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["processes", "inline", "guesses"]
)
async def engine_of_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    folder: Path = tmp_path_factory.mktemp("text") / "script"
    more = {"scripts": SCRIPTS, "end_token_ids": [END, EOS2], "context_length": 4096}
    model = write_script(folder, WORDS, ids("d"), **more)
    run = run_processes if request.param == "processes" else run_inline
    guesses = {"speculative_algorithm": "ngram"} if request.param == "guesses" else {}
    async with run(model=model, **guesses) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def running(engine_of_module: Running) -> AsyncIterator[Running]:
    """With a stream beside every test, which must come out as ever."""
    async with neighbour(engine_of_module, "neighbour", "tick " * 400):
        yield engine_of_module


def ask(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 50, **more}


# --- stop strings ----------------------------------------------------------------------------------


async def test_no_part_of_a_stop_string_is_seen(running: Running) -> None:
    async with running.http() as http:
        for prompt, stop, expected in (
            ("marker", ["<<END>>"], ("go ", "stop")),
            ("marker", "<<END>>", ("go ", "stop")),
            ("marker", ["<<END>>", "<<E"], ("go ", "stop")),
            ("marker", ["<<END>>", "END"], ("go <<", "stop")),
            ("near", ["<<END>>"], ("go <<ENT>", "stop")),
            ("near", ["T>", "nothing"], ("go <<EN", "stop")),
            ("prefix", ["ab", "abc"], ("x", "stop")),
            ("prefix", ["abc", "ab"], ("x", "stop")),
            ("one piece", ["ab", "abc"], ("x", "stop")),
            ("prefix", ["bc", "abc"], ("x", "stop")),
            ("prefix", ["abcde", "bcd"], ("xa", "stop")),
            ("prefix", ["abcdx"], ("xabcd", "stop")),
        ):
            assert await both_ways(http, ask(prompt, stop=stop)) == expected, (prompt, stop)
        shown = ask("marker", stop=["<<END>>"], include_stop_str_in_output=True)
        assert await both_ways(http, shown) == ("go <<END>>", "stop")
        chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "stop": "zz"}
        assert await both_ways(http, chat, "/v1/chat/completions") == ("d", "stop")


async def test_a_stop_string_at_the_last_allowed_token(running: Running) -> None:
    """A match on the very last token is a stop, one token less is the length."""
    async with running.http() as http:
        for limit, expected in (
            (5, ("go ", "stop")),
            (4, ("go <<END>", "length")),
            (2, ("go <<", "length")),
        ):
            body = ask("marker", stop=["<<END>>"], max_tokens=limit)
            assert await both_ways(http, body) == expected
            whole = (await http.post("/v1/completions", json=body)).json()
            assert whole["usage"]["completion_tokens"] == limit


async def test_a_stop_string_need_not_be_a_token(running: Running) -> None:
    async with running.http() as http:
        for prompt in ("newlines 1", "newlines 2", "newlines 3"):
            for n in (1, 3):
                body = ask(prompt, stop=["\n\n"], n=n)
                assert await both_ways(http, body) == ("a", "stop"), prompt
                answer = (await http.post("/v1/completions", json=body)).json()
                assert [c["text"] for c in answer["choices"]] == ["a"] * n
        for stop, text in ((COMPASS, "a"), (f"{COMPASS}b", "a"), (f"a{COMPASS}", "")):
            assert await both_ways(http, ask("compass and more", stop=[stop])) == (text, "stop")


async def test_which_stops_are_taken(running: Running) -> None:
    async with running.http() as http:
        for stop in ("", [""], ["a", ""], "x" * 1_000_000, [str(n) for n in range(5000)], [1], 1):
            answer = await http.post("/v1/completions", json=ask("prefix", stop=stop))
            assert answer.status_code == 400, stop
            assert answer.json()["error"]["param"].startswith("stop")
        for free in (None, [], ["\x00"], ["\ufffd"], ["x" * 1024]):
            assert await both_ways(http, ask("prefix", stop=free)) == ("xabcd", "stop")
        many = [f"{'a' * 1000}{number}" for number in range(32)]
        body = ask("neighbour", stop=many, max_tokens=300)
        assert await both_ways(http, body) == ("tick " * 300, "length")


# --- half characters -------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [None, ["zz"], ["\ufffd"], [COMPASS + "x"]])
async def test_a_limit_inside_a_character(running: Running, stop: list[str] | None) -> None:
    """The half character is one U+FFFD at the end, and never comes before the whole one does."""
    async with running.http() as http:
        for limit, text in ((1, "\ufffd"), (2, "\ufffd"), (3, "\ufffd"), (4, COMPASS)):
            body = ask("compass", max_tokens=limit, stop=stop)
            assert await both_ways(http, body) == (text, "length")
            streamed = await stream(http, "/v1/completions", body)
            deltas = [delta for delta in streamed.choices[0].deltas if delta]
            assert deltas == [text], limit
            logprobs = {**body, "logprobs": 1}
            assert await both_ways(http, logprobs) == (text, "length")
        body = ask("compass", max_tokens=5, stop=stop)
        assert await both_ways(http, body) == (COMPASS, "stop")


async def test_torn_characters_are_the_same_both_ways(running: Running) -> None:
    async with running.http() as http:
        expected = b"".join(
            bytes([token]) if token < 256 else WORDS[token - 256].encode()
            for token in SCRIPTS["torn"]
        ).decode("utf-8", "replace")
        assert await both_ways(http, ask("torn")) == (expected, "stop")
        for limit in range(1, 9):
            data = b"".join(
                bytes([token]) if token < 256 else WORDS[token - 256].encode()
                for token in SCRIPTS["torn"][:limit]
            )
            text = data.decode("utf-8", "replace")
            assert await both_ways(http, ask("torn", max_tokens=limit)) == (text, "length")
        answer = await http.post("/generate", json=ask("torn", logprobs=0))
        entries = answer.json()["choices"][0]["logprobs"]
        rebuilt = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert rebuilt.decode("utf-8", "replace") == expected


async def test_an_abort_inside_a_character(running: Running) -> None:
    for cut in (1, 2, 3, 4, 6, 7):
        text, tokens, reasons = "", 0, []
        rid = f"cut-{cut}"
        params = SamplingParams(temperature=0.0)
        async for piece in running.client.stream("compasses", params, rid=rid):
            if tokens < cut <= tokens + len(piece.token_ids):
                await running.client.abort(rid)
            text, tokens = text + piece.text, tokens + len(piece.token_ids)
            reasons += [piece.finish.reason] if piece.finish else []
        assert reasons in (["abort"], ["stop"])  # the whole of it may be faster than the abort
        text.encode()
        whole, part = divmod(min(tokens, 1600), 4)
        assert text == COMPASS * whole + "\ufffd" * bool(part)


# --- least lengths ---------------------------------------------------------------------------------


def expect(
    script: list[int], least: int, limit: int, stop_ids: set[int], stop: str | None
) -> tuple[list[int], str, str]:
    """By definition: what ends a sample may do so with the token that `least` others come before."""
    tokens: list[int] = []
    text = ""
    while True:
        position = len(tokens)
        wanted = [*script[position:], END, *range(END)]
        banned = stop_ids if position < least else set()
        token = next(one for one in wanted if one not in banned)
        tokens.append(token)
        if token in stop_ids:
            return tokens, text, "stop"
        if token not in ENDS:
            text += WORDS[token - 256] if token >= 256 else chr(token)
        if stop is not None and position >= least and text.endswith(stop):
            return tokens, text.removesuffix(stop), "stop"
        if len(tokens) == limit:
            return tokens, text, "length"


@pytest.mark.parametrize("least", range(6))
async def test_least_lengths(running: Running, least: int) -> None:
    matrix: list[tuple[str, dict[str, Any]]] = [
        ("eos", {}),
        ("eos2", {}),
        ("eos", {"ignore_eos": True}),
        ("eos2", {"ignore_eos": True, "stop_token_ids": ids("c")}),
        ("lines", {"stop": "\n"}),
        ("lines", {"stop": "\nc"}),
        ("lines", {"stop_token_ids": ids("\n")}),
        ("lines", {"stop_token_ids": ids("b", "c"), "stop": "\n"}),
        ("lines", {"stop_token_ids": [END]}),
    ]
    async with running.http() as http:
        for limit in (6, 7):
            for prompt, more in matrix:
                body = ask(prompt, min_tokens=least, max_tokens=limit, **more)
                stop_ids = set(more.get("stop_token_ids", []))
                stop_ids |= set() if more.get("ignore_eos") else ENDS
                tokens, text, reason = expect(
                    SCRIPTS[prompt], least, limit, stop_ids, more.get("stop")
                )
                answer = (await http.post("/generate", json=body)).json()
                choice = answer["choices"][0]
                assert (choice["token_ids"], choice["text"]) == (tokens, text), body
                assert choice["finish_reason"] == reason, body
                assert answer["usage"]["completion_tokens"] == len(tokens)
                assert await both_ways(http, body) == (text, reason), body


async def test_exactly_so_many_tokens(running: Running) -> None:
    async with running.http() as http:
        for count in range(1, 8):
            body = ask("eos", min_tokens=count, max_tokens=count, stop=["d"])
            answer = (await http.post("/v1/completions", json=body)).json()
            assert answer["usage"]["completion_tokens"] == count
            assert answer["choices"][0]["finish_reason"] == "length"
            refused = await http.post("/v1/completions", json={**body, "min_tokens": count + 1})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "min_tokens"


# --- usage -----------------------------------------------------------------------------------------


def sure(usage: dict[str, Any]) -> dict[str, Any]:
    """Without how many guesses there were: that depends on what else ran, and on time."""
    return {key: value for key, value in usage.items() if key != "completion_tokens_details"}


async def test_usage_is_the_same_streamed_and_whole(running: Running) -> None:
    cases: list[tuple[dict[str, Any], tuple[int, int]]] = [
        (ask("seven b", max_tokens=5), (7, 5)),
        (ask("seven b", max_tokens=5, n=2), (7, 10)),
        (ask("seven b"), (7, 6)),  # the end token counts
        (ask("seven b", stop="c"), (7, 3)),
        (ask("seven b", stop="c", n=3), (7, 9)),
        (ask("seven b", stop="cd"), (7, 4)),
        (ask("seven b", stop="e", max_tokens=5), (7, 5)),
        (ask("seven b", stop_token_ids=ids("d")), (7, 4)),
        (ask("seven b", max_tokens=0, echo=True), (7, 0)),
        (ask("silent", max_tokens=4, ignore_eos=True), (6, 4)),
        (ask("compass", max_tokens=2), (7, 2)),
        ({**ask(""), "prompt": ["seven b", "compass"], "max_tokens": 3, "n": 2}, (14, 12)),
    ]
    async with running.http() as http:
        for body, (prompt, completion) in cases:
            whole = (await http.post("/v1/completions", json=body)).json()["usage"]
            numbers = (whole["prompt_tokens"], whole["completion_tokens"], whole["total_tokens"])
            assert numbers == (prompt, completion, prompt + completion), body
            with_usage = {**body, "stream_options": {"include_usage": True}}
            streamed = await stream(http, "/v1/completions", with_usage)
            assert [sure(each) for each in streamed.usages] == [sure(whole)] and streamed.bodies[
                -1
            ]["choices"] == [], body
            assert all(event["usage"] is None for event in streamed.bodies[:-1])
            without = await stream(http, "/v1/completions", body)
            assert not any("usage" in event for event in without.bodies), body
            each = {**body, "stream_options": {"continuous_usage_stats": True}}
            last = (await stream(http, "/v1/completions", each)).usages[-1]
            assert sure(last) == sure(whole)
            native = {key: value for key, value in body.items() if key != "echo"}
            if isinstance(body["prompt"], str):
                answer = (await http.post("/generate", json=native)).json()
                assert answer["usage"]["completion_tokens"] == completion
        chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 2}
        await http.post("/v1/chat/completions", json=chat)  # from here on its prefix is cached
        whole = (await http.post("/v1/chat/completions", json=chat)).json()["usage"]
        with_usage = {**chat, "stream_options": {"include_usage": True}}
        streamed = await stream(http, "/v1/chat/completions", with_usage)
        assert [sure(each) for each in streamed.usages] == [sure(whole)] and whole[
            "completion_tokens"
        ] == 2


async def test_cached_tokens_are_counted_in_streams_too(running: Running) -> None:
    async with running.http() as http:
        body = {**ask("q" * 100), "max_tokens": 2, "n": 2}
        await http.post("/v1/completions", json=body)
        whole = (await http.post("/v1/completions", json=body)).json()["usage"]
        assert 0 < whole["prompt_tokens_details"]["cached_tokens"] < 100
        with_usage = {**body, "stream_options": {"include_usage": True}}
        assert (await stream(http, "/v1/completions", with_usage)).usages == [whole]


async def test_usage_of_what_was_aborted(running: Running) -> None:
    """The end of an aborted sample counts what came, and the prompt."""
    finishes = []
    count = 0
    params = SamplingParams(temperature=0.0)
    async for piece in running.client.stream("compasses", params, rid="gone"):
        if piece.token_ids and not count:
            await running.client.abort("gone")
        count += len(piece.token_ids)
        finishes += [piece.finish] if piece.finish else []
    assert len(finishes) == 1
    usage = finishes[0].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len("compasses"), count)


async def test_many_at_once_keep_their_own_text(running: Running) -> None:
    async with running.http() as http:
        bodies = [
            (ask("marker", stop=["<<END>>"]), "go "),
            (ask("newlines 3", stop=["\n\n"]), "a"),
            (ask("compass", max_tokens=3), "\ufffd"),
            (ask("compass and more"), f"a{COMPASS}b"),
            (ask("lines", stop="\n", min_tokens=3), "a\nb"),
        ] * 8
        answers = await asyncio.gather(*(both_ways(http, body) for body, _ in bodies))
        assert [text for text, _ in answers] == [text for _, text in bodies]
    await probe(running)


async def test_nothing_is_left(engine_of_module: Running) -> None:
    await balance(engine_of_module)
