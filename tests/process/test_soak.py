"""A short soak of the whole engine, and the soak's own judgement: it must see what is wrong."""

from __future__ import annotations

import pytest

from bench.soak.__main__ import read_options, render, soak
from bench.soak.books import check_memory
from bench.soak.judge import Outcome, judge
from bench.soak.plan import Cut, Errand, Library, draw_errands, draw_settings


@pytest.mark.parametrize("mode", [(), ("--inline",)], ids=["processes", "inline"])
async def test_three_hundred_random_requests(mode: tuple[str, ...]) -> None:
    report = await soak(read_options(["--requests", "300", "--seed", "8", *mode]))
    assert report["faults"] == [], render(report)
    outcomes = report["outcomes"]
    assert sum(outcomes.values()) == 300 and "busy" not in outcomes
    assert {"finished", "aborted", "hang up", "refused"} <= set(outcomes)
    assert report["retractions"] > 0 and report["cache_hit_tokens"] > 0
    assert "none" in render(report)


def test_the_same_seed_asks_the_same() -> None:
    library = Library(3)
    draws = [
        draw_errands(50, seed, library, ways=("http", "zmq"), max_tokens=20, cut=0.1)
        for seed in (3, 3, 4)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert library.script() == Library(3).script()
    assert draw_settings(3) == draw_settings(3)
    assert {errand.cut for errand in draws[0]} == {"", "abort", "hang up"}


def make(cut: Cut = "", **fields: object) -> tuple[Errand, Library, str]:
    library = Library(1)
    asked = {"max_tokens": 8, **fields}
    prompt = library.prompts[0]
    errand = Errand(number=1, way="zmq", is_chat=False, prompt=prompt, fields=asked, cut=cut)
    return errand, library, library.answer(errand)[0]


def outcome(text: str, *ends: str, error: str | None = None, has_ended: bool = True) -> Outcome:
    return Outcome(texts={0: text}, ends={0: list(ends)}, error=error, has_ended=has_ended)


def test_right_answers_pass() -> None:
    errand, library, text = make()
    assert judge(errand, outcome(text, "length"), library) == []
    cut, _, _ = make("hang up")
    assert judge(cut, outcome(text[:5], has_ended=False), library) == []
    aborted, _, _ = make("abort")
    assert judge(aborted, outcome(text[:5], "abort"), library) == []
    assert judge(aborted, outcome(text[:5], error="aborted"), library) == []
    stopped, _, _ = make(stop=[text[4:6]])
    assert judge(stopped, outcome(text[: text.index(text[4:6])], "stop"), library) == []


def test_wrong_answers_are_named() -> None:
    errand, library, text = make()
    other = Library(1).answer(make()[0])[0][::-1]
    for seen, words in (
        (outcome(other, "length"), "instead of"),
        (outcome(text[:-1], "length"), "instead of"),
        (outcome(text + "x", "length"), "instead of"),
        (outcome(text, "stop"), "instead of"),
        (outcome(text, "length", "length"), "ended 2 times"),
        (outcome(text, "abort"), "ended with"),
        (outcome(text, error="internal"), "ended in internal"),
        (outcome("", error="queue_full"), "the queue full"),
        (outcome(text, has_ended=False), "never came to an end"),
        (Outcome(has_ended=True), "0 of 1 samples"),
        (Outcome(texts={3: ""}, ends={0: ["length"]}, has_ended=True), "samples [3]"),
    ):
        found = judge(errand, seen, library)
        assert any(words in sentence for sentence in found), (seen, found)
    bad = Errand(number=1, way="http", is_chat=False, prompt="", is_bad=True)
    assert judge(bad, outcome("", "length"), library)
    assert judge(bad, Outcome(error="internal"), library)
    assert judge(bad, Outcome(error="invalid_value"), library) == []


def test_growth_is_noticed() -> None:
    assert check_memory({"a": 10_000_000}, {"a": 26_000_000}) == []
    assert check_memory({"a": 10_000_000}, {"a": 40_000_000})
