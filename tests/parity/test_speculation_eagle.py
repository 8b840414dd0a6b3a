"""Drafts that read the target's features change no answer: chains and trees, of networks that know
nothing and of one that is always right."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from request_set import all_requests, ask, long_requests, words
from whole_engine import Engine, Outcome, Setting, engine, expect_equal, num_retractions

from srt.config.facts import ModelFacts
from srt.scheduler.balance import Balance
from srt.scheduler.pace import Pace
from srt.wire.messages import Work

Outcomes = dict[int, Outcome]
USUAL = Setting(radix=True, depth=1, chunk=16, drafter="eagle3")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody gets guesses always, however wrong they were and whatever they cost."""
    monkeypatch.setattr(Pace, "learn", lambda *_: None)
    monkeypatch.setattr(Balance, "pays", lambda *_: True)


def count(made: Engine) -> tuple[int, int]:
    usages = [each.end.usage for each in made.outcomes.values()]
    return sum(u.drafted_tokens for u in usages), sum(u.accepted_tokens for u in usages)


def texts(requests: list[Work], outcomes: Outcomes) -> list[list[int]]:
    return [[*work.token_ids, *outcomes[work.uid].tokens] for work in requests]


@pytest.mark.parametrize(
    ("knows", "topk", "page_size", "depth"), list(product((False, True), (1, 3), (1, 16), (0, 1)))
)
def test_plain_equals_speculative(
    knows: bool, topk: int, page_size: int, depth: int, facts: ModelFacts, alone: Outcomes
) -> None:
    requests = all_requests()
    answers = texts(requests, alone) if knows else None
    setting = replace(
        USUAL, page_size=page_size, depth=depth, topk=topk, draft_tokens=4 if topk == 1 else 7
    )
    with engine(facts, setting, answers=answers) as made:
        found = made.run(requests[:3], requests[3:12], requests[12:])
        expect_equal(found, alone)
        drafted, accepted = count(made)
        verified = sum(len(each.tokens) for each in found.values()) - accepted
    assert drafted > 100
    if not knows:
        assert accepted < 0.25 * drafted
    elif topk == 1:
        assert accepted >= 0.9 * drafted
    else:
        assert accepted > verified  # more than one guess of a tree is right, time after time


@pytest.mark.parametrize(("topk", "depth"), list(product((1, 3), (0, 1))))
def test_lookup_and_model_take_turns(
    topk: int, depth: int, facts: ModelFacts, alone: Outcomes
) -> None:
    """A row that is passed over for some steps still guesses right afterwards."""
    setting = replace(USUAL, topk=topk, depth=depth, draft_tokens=7, lookup=True)
    requests = all_requests()
    with engine(facts, setting, answers=texts(requests, alone)) as made:
        expect_equal(made.run(requests[:3], requests[3:12], requests[12:]), alone)
        drafted, accepted = count(made)
    assert accepted > 0.3 * drafted


@pytest.mark.parametrize(("topk", "depth"), list(product((1, 3), (0, 1))))
def test_retraction_resumes_exactly(
    topk: int, depth: int, facts: ModelFacts, alone: Outcomes
) -> None:
    setting = replace(
        USUAL, topk=topk, depth=depth, chunk=3, kv_tokens=256, draft_tokens=4 if topk == 1 else 7
    )
    chosen = [*long_requests(), *(each for each in all_requests() if each.uid in (9, 20, 23, 27))]
    with engine(facts, setting, answers=texts(chosen, alone)) as made:
        found = made.run(chosen)
        expect_equal(found, alone)
        assert num_retractions(found) > 0 and made.num_evicted > 0
        assert count(made)[1] > 0


@pytest.mark.parametrize("topk", (1, 3))
@pytest.mark.parametrize("page_size", (1, 16))
def test_nothing_is_lost_at_the_limits(page_size: int, topk: int, facts: ModelFacts) -> None:
    """max_tokens 1..8, and prompts that end 0..7 tokens before the context does."""
    room = facts.context_length
    requests = [ask(400 + n, words(80, 12), n) for n in range(1, 9)]
    requests += [ask(420 + n, words(81, room - n), None) for n in range(1, 9)]
    with engine(facts, Setting(max_running=1, max_step_tokens=512)) as plain:
        expected = {}
        for work in requests:
            expected.update(plain.run([work]))
    setting = replace(USUAL, page_size=page_size, topk=topk, draft_tokens=7, chunk=64)
    with engine(facts, setting, answers=texts(requests, expected)) as made:
        expect_equal(made.run(requests), expected)
