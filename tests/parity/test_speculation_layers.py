"""EAGLE (1 and 2) and MTP layers change no answer: drafts that know nothing, and drafts that compute
what the target computes, so that all guesses are right if what their KV pools hold is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from request_set import all_requests, ask, long_requests, words
from whole_engine import Engine, Outcome, Setting, engine, expect_equal, num_retractions

from srt.config.facts import ModelFacts
from srt.config.probe_layers import layer_facts
from srt.scheduler.balance import Balance
from srt.scheduler.pace import Pace
from srt.wire.messages import Work
from tests.layered_models import NUM_LAYERS, save_perfect

Outcomes = dict[int, Outcome]
USUAL = Setting(radix=True, depth=1, chunk=16)
EAGLES = [replace(USUAL, drafter="eagle", topk=topk, draft_tokens=7) for topk in (2, 3, 4)]
EAGLES[2] = replace(EAGLES[2], draft_tokens=10)
CHAIN = replace(USUAL, drafter="eagle")
LAYERS = replace(USUAL, drafter="multi_layer", draft_tokens=NUM_LAYERS)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody gets guesses always, however wrong they were and whatever they cost."""
    monkeypatch.setattr(Pace, "learn", lambda *_: None)
    monkeypatch.setattr(Balance, "pays", lambda *_: True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFacts, ModelFacts]:
    """A target that brings MTP layers which are right, and an EAGLE draft that is."""
    return save_perfect(tmp_path_factory.mktemp("perfect"))


@pytest.fixture(scope="module")
def perfect(pair: tuple[ModelFacts, ModelFacts]) -> ModelFacts:
    return pair[0]


@pytest.fixture(scope="module")
def lone(perfect: ModelFacts) -> Outcomes:
    """The requests one after the other, without guesses."""
    found: Outcomes = {}
    with engine(perfect, Setting(max_running=1, max_step_tokens=512)) as made:
        for work in all_requests():
            found.update(made.run([work]))
    assert len({tuple(each.tokens[:6]) for each in found.values()}) > 20  # no dull model
    return found


def draft_of(pair: tuple[ModelFacts, ModelFacts], setting: Setting) -> ModelFacts | None:
    return pair[1] if setting.drafter == "eagle" else layer_facts(pair[0])


def count(made: Engine, uids: set[int] | None = None) -> tuple[int, int]:
    usages = [each.end.usage for uid, each in made.outcomes.items() if uids is None or uid in uids]
    return sum(u.drafted_tokens for u in usages), sum(u.accepted_tokens for u in usages)


def waves(requests: list[Work]) -> tuple[list[Work], ...]:
    return requests[:3], requests[3:12], requests[12:]


def name_of(value: object) -> str:
    return f"{value.drafter}-{value.topk}" if isinstance(value, Setting) else str(value)


@pytest.mark.parametrize(
    ("setting", "page_size", "depth"),
    [
        *product((CHAIN, EAGLES[1], LAYERS), (1, 16), (0, 1)),
        *zip(
            (EAGLES[0], EAGLES[0], EAGLES[2], EAGLES[2]), (1, 16, 1, 16), (0, 1, 1, 0), strict=True
        ),
    ],
    ids=name_of,
)
def test_random_drafts_change_nothing(
    setting: Setting, page_size: int, depth: int, facts: ModelFacts, alone: Outcomes
) -> None:
    with engine(facts, replace(setting, page_size=page_size, depth=depth)) as made:
        expect_equal(made.run(*waves(all_requests())), alone)
        drafted, accepted = count(made)
    assert drafted > 100 and accepted < 0.25 * drafted


@pytest.mark.parametrize(
    ("setting", "page_size", "depth"),
    list(product((CHAIN, EAGLES[1], LAYERS), (1, 16), (0, 1))),
    ids=name_of,
)
def test_perfect_drafts_are_right(
    setting: Setting,
    page_size: int,
    depth: int,
    pair: tuple[ModelFacts, ModelFacts],
    lone: Outcomes,
) -> None:
    """MTP layers at every temperature; EAGLE where the scale of the logits does not matter. Without
    shared prefixes, behind which a draft has to begin anew."""
    setting = replace(setting, page_size=page_size, depth=depth, radix=False)
    requests = all_requests()
    with engine(pair[0], setting, draft=draft_of(pair, setting)) as made:
        found = made.run(*waves(requests))
        expect_equal(found, lone)
        greedy = {work.uid for work in requests if plain_greedy(work)}
        drafted, accepted = count(made, greedy if setting.drafter == "eagle" else None)
        steps = sum(len(found[uid].tokens) for uid in greedy) - count(made, greedy)[1]
    assert drafted > 100
    if setting.topk == 1:
        assert accepted >= 0.97 * drafted  # a run that ends in the midst of right guesses
    else:
        assert accepted > steps


def plain_greedy(work: Work) -> bool:
    params = work.params
    rules = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return params.temperature == 0.0 and rules == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("setting", (CHAIN, EAGLES[1], LAYERS), ids=name_of)
@pytest.mark.parametrize("depth", (0, 1))
def test_retraction_resumes_exactly(
    depth: int, setting: Setting, pair: tuple[ModelFacts, ModelFacts], lone: Outcomes
) -> None:
    setting = replace(setting, depth=depth, chunk=3, kv_tokens=256)
    chosen = [*long_requests(), *(each for each in all_requests() if each.uid in (9, 20, 23, 27))]
    with engine(pair[0], setting, draft=draft_of(pair, setting)) as made:
        found = made.run(chosen)
        expect_equal(found, lone)
        assert num_retractions(found) > 0 and made.num_evicted > 0
        assert count(made)[1] > 100


@pytest.mark.parametrize("setting", (CHAIN, EAGLES[1], LAYERS), ids=name_of)
@pytest.mark.parametrize("page_size", (1, 16))
def test_nothing_is_lost_at_the_limits(
    page_size: int, setting: Setting, pair: tuple[ModelFacts, ModelFacts]
) -> None:
    """max_tokens 1..8, and prompts that end 0..7 tokens before the context does."""
    facts = pair[0]
    room = facts.context_length
    requests = [ask(400 + n, words(80, 12), n) for n in range(1, 9)]
    requests += [ask(420 + n, words(81, room - n), None) for n in range(1, 9)]
    with engine(facts, Setting(max_running=1, max_step_tokens=512)) as plain:
        expected: Outcomes = {}
        for work in requests:
            expected.update(plain.run([work]))
    setting = replace(setting, page_size=page_size, chunk=64)
    with engine(facts, setting, draft=draft_of(pair, setting)) as made:
        expect_equal(made.run(requests), expected)
