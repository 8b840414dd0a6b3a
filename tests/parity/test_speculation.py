"""Speculation changes no answer: not a token, not an end, not a log-probability.

With the target as its own draft (all guesses right, at every temperature), with a draft of other weights
(nearly all wrong) and with n-grams.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from request_set import all_requests, ask, long_requests, words
from whole_engine import Engine, Outcome, Setting, engine, expect_equal, num_retractions

from srt.config.facts import ModelFacts
from srt.scheduler.balance import Balance
from srt.scheduler.pace import Pace
from srt.wire.messages import AbortWork, Work

Outcomes = dict[int, Outcome]
DRAFTERS = ("ngram", "self", "random")
USUAL = Setting(radix=True, depth=1, chunk=16, drafter="self")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody gets guesses always, however wrong they were and whatever they cost."""
    monkeypatch.setattr(Pace, "learn", lambda *_: None)
    monkeypatch.setattr(Balance, "pays", lambda *_: True)


def in_waves(requests: list[Work]) -> tuple[list[Work], ...]:
    return requests[:3], requests[3:12], requests[12:]


def count(made: Engine) -> tuple[int, int]:
    """Guesses verified and guesses that were right."""
    usages = [each.end.usage for each in made.outcomes.values()]
    return sum(u.drafted_tokens for u in usages), sum(u.accepted_tokens for u in usages)


@pytest.mark.parametrize(
    ("drafter", "page_size", "depth"), list(product(DRAFTERS, (1, 16), (0, 1)))
)
def test_plain_equals_speculative(
    drafter: str, page_size: int, depth: int, facts: ModelFacts, alone: Outcomes
) -> None:
    setting = replace(USUAL, drafter=drafter, page_size=page_size, depth=depth)
    with engine(facts, setting) as made:
        expect_equal(made.run(*in_waves(all_requests())), alone)
        drafted, accepted = count(made)
    assert drafted > 100
    if drafter == "self":
        assert accepted >= 0.98 * drafted  # a run that ends in the midst of right guesses
    if drafter == "random":
        assert accepted < 0.2 * drafted


@pytest.mark.parametrize(
    ("drafter", "page_size", "depth"), list(product(("ngram", "self"), (1, 16), (0, 1)))
)
def test_retraction_resumes_exactly(
    drafter: str, page_size: int, depth: int, facts: ModelFacts, alone: Outcomes
) -> None:
    """Room for guesses is given up like any other; what guesses left in the KV pool is not read."""
    setting = replace(
        USUAL, drafter=drafter, page_size=page_size, depth=depth, chunk=3, kv_tokens=256
    )
    chosen = [*long_requests(), *(each for each in all_requests() if each.uid in (9, 20, 23, 27))]
    with engine(facts, setting) as made:
        found = made.run(chosen)
        expect_equal(found, alone)
        assert num_retractions(found) > 0 and made.num_evicted > 0
        assert count(made)[1] > 0


@pytest.mark.parametrize("depth", (0, 1))
def test_aborts_disturb_nobody(depth: int, facts: ModelFacts, alone: Outcomes) -> None:
    setting = replace(USUAL, depth=depth, kv_tokens=512, max_running=6, chunk=3)
    gone = {2, 7, 9, 12, 15, 18, 29}
    with engine(facts, setting) as made:
        made.scheduler.turn(all_requests())
        for uid in sorted(gone):
            made.scheduler.turn([])
            made.scheduler.turn([AbortWork(uid=uid)])
        made.run()
        rest = {uid: each for uid, each in made.outcomes.items() if uid not in gone}
    assert len(rest) == len(alone) - len(gone)
    expect_equal(rest, alone)


H18 = (
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 0.8},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.0, "repetition_penalty": 1.1, "temperature": 0.9, "top_k": 20},
    {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": list(range(3, 60))},
)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_rule_counts_the_guesses_that_were_kept(drafter: str, facts: ModelFacts) -> None:
    """A repetitive prompt, a rule that what was generated changes, and the favourite token banned."""
    prompt = words(70, 4) * 6
    requests = [ask(300 + i, prompt, 40, **rules) for i, rules in enumerate(H18)]
    with engine(facts, Setting(max_running=1, max_step_tokens=512)) as plain:
        expected = plain.run(requests)
        [favourite] = plain.run([ask(350, prompt, 1)])[350].tokens
        banned = ask(351, prompt, 40, logit_bias={favourite: -100.0})
        expected |= plain.run([banned])
    assert favourite not in expected[351].tokens
    assert len({tuple(each.tokens) for each in expected.values()}) >= len(H18)
    with engine(facts, replace(USUAL, drafter=drafter)) as made:
        found = made.run(requests, [banned])
        expect_equal(found, {uid: expected[uid] for uid in found})
        assert count(made)[0] > 50


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("page_size", (1, 16))
def test_nothing_is_lost_at_the_limits(page_size: int, depth: int, facts: ModelFacts) -> None:
    """max_tokens 1..8 and prompts that end 0..7 tokens before the context does; the longer the guesses
    the sooner they would overflow."""
    room = facts.context_length
    requests = [ask(400 + n, words(80, 12), n) for n in range(1, 9)]
    requests += [ask(420 + n, words(81, room - n), None) for n in range(1, 9)]
    with engine(facts, Setting(max_running=1, max_step_tokens=512)) as plain:
        expected = {}
        for work in requests:
            expected.update(plain.run([work]))
    setting = replace(USUAL, page_size=page_size, depth=depth, draft_tokens=7, chunk=64)
    with engine(facts, setting) as made:
        found = made.run(requests)
        expect_equal(found, expected)
    assert [len(found[400 + n].tokens) for n in range(1, 9)] == list(range(1, 9))
    assert [len(found[420 + n].tokens) for n in range(1, 9)] == list(range(1, 9))
