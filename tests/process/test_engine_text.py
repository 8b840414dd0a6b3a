"""Stop strings, half characters and their counts, through all processes."""

from __future__ import annotations

from collections.abc import Callable

from srt.client import SamplingParams
from tests.process.conftest import RunEngine


async def test_stops_and_half_characters_say_the_same_in_every_mode(
    engine: RunEngine, script: Callable[..., str]
) -> None:
    words = ["go", " <", "<E", "ND>", ">more", "a\n", "\n", "b"]
    compass = list("\U0001f9ed".encode())
    model = script(
        words,
        scripts={
            "leak": [256, 257, 258, 259, 260, 256],
            "lines": [261, 262, 263],
            "bytes": compass,
        },
    )
    cases = [  # prompt, stop, most, text, reason, matched, tokens
        ("leak", ["<<END>>"], 90, "go ", "stop", "<<END>>", 5),
        ("leak", ["<<END>>"], 5, "go ", "stop", "<<END>>", 5),
        ("leak", ["<<END>>"], 4, "go <<END>", "length", None, 4),
        ("lines", ["\n\n"], 90, "a", "stop", "\n\n", 2),
        ("bytes", [], 3, "\ufffd", "length", None, 3),
        ("bytes", ["\U0001f9ed"], 4, "", "stop", "\U0001f9ed", 4),
        ("bytes", [], 4, "\U0001f9ed", "length", None, 4),
    ]
    async with engine(model=model) as running:
        for prompt, stop, most, text, reason, matched, count in cases:
            params = SamplingParams(temperature=0.0, stop=stop, max_tokens=most)
            whole = await running.client.generate(prompt, params)
            pieces = [piece async for piece in running.client.stream(prompt, params)]
            streamed = pieces[-1].finish
            assert streamed is not None
            assert whole.text == text == "".join(piece.text for piece in pieces)
            assert all("\ufffd" not in piece.text for piece in pieces[:-1])
            for finish in (whole.samples[0].finish, streamed):
                assert (finish.reason, finish.matched) == (reason, matched)
                assert finish.usage.completion_tokens == count
                assert finish.usage.prompt_tokens == len(prompt)
                assert finish.cache is not None
                assert finish.timing is not None and finish.timing.prefill >= 0.0
            assert sum(len(piece.token_ids) for piece in pieces) == count
        await running.settle()


async def test_min_tokens_is_one_rule_for_every_stop(
    engine: RunEngine, script: Callable[..., str]
) -> None:
    """The token that ends the output comes after `min_tokens` others, a stop string's as well as a
    stop token's. The scripted model says something else where a stop token is too early."""
    by_string = ["a", "a", "a\na", "a\na", "a\na\nc", "a\na\nc"]
    async with engine(model=script(["a", "\n", "c"], script=[256, 257, 256, 257, 258])) as running:
        for least, text in enumerate(by_string):
            string = SamplingParams(temperature=0.0, stop=["\n"], min_tokens=least)
            token = SamplingParams(temperature=0.0, stop_token_ids=[257], min_tokens=least)
            results = [await running.client.generate("x", params) for params in (string, token)]
            assert results[0].text == text
            counts = {result.usage.completion_tokens for result in results}
            assert counts == {(2, 2, 4, 4, 6, 6)[least]}
        await running.settle()
