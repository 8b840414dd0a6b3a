"""Nothing that is only about speed or memory changes an answer.

Tokens and ends are compared to the bit, log-probabilities to 1e-4. That is fair because the tiny model
computes in float32 (settings differ in its last bits, about 3e-6) and because none of the choices made
here is closer than 3e-4, which `test_no_choice_is_a_near_tie` proves.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from request_set import VOCAB, again, all_requests, ask, long_requests, words
from transformers import LlamaForCausalLM
from whole_engine import (
    Outcome,
    Setting,
    engine,
    expect_equal,
    num_cached,
    num_retractions,
)

from srt.config.facts import ModelFacts
from srt.wire.messages import AbortWork, Work

Outcomes = dict[int, Outcome]
USUAL = Setting(radix=True, depth=1, chunk=16)


def in_waves(requests: list[Work]) -> tuple[list[Work], ...]:
    """Prompts arrive while others generate. A follower never comes before its leader."""
    return requests[:3], requests[3:12], requests[12:]


def test_answers_depend_on_every_token_of_the_prompt(facts: ModelFacts, alone: Outcomes) -> None:
    """Otherwise no error in the KV memory could be seen."""
    answers = [tuple(alone[uid].tokens) for uid in range(1, 20) if uid != 14]
    assert len(set(answers)) == len(answers)
    prompt = words(9, 65)
    assert alone[9].tokens != alone[9].tokens[:1] * 12
    changed = []
    for place in range(65):
        other = [*prompt]
        other[place] = 3 + (other[place] - 3 + 50) % (VOCAB - 3)
        changed.append(ask(place, other, 1, logprobs=VOCAB))
    with engine(facts, Setting()) as made:
        [first] = made.run([ask(99, prompt, 1, logprobs=VOCAB)])[99].logprobs
        found = made.run(changed)
    values = {entry.token: entry.logprob for entry in first.top}
    for outcome in found.values():
        [its] = outcome.logprobs
        assert max(abs(values[entry.token] - entry.logprob) for entry in its.top) > 0.02


def test_no_choice_is_a_near_tie(facts: ModelFacts, alone: Outcomes) -> None:
    """Noise a hundred times what the settings' rounding amounts to changes no token."""
    generator = torch.Generator().manual_seed(0)
    with engine(facts, Setting()) as made:
        exact = made.worker.runner.logits

        def noisy(hidden: torch.Tensor) -> torch.Tensor:
            logits = exact(hidden)
            return logits + 3e-4 * (2 * torch.rand(logits.shape, generator=generator) - 1)

        made.worker.runner.logits = noisy  # type: ignore[method-assign]
        found = made.run(all_requests())
    assert {uid: each.tokens for uid, each in found.items()} == {
        uid: each.tokens for uid, each in alone.items()
    }


def test_alone_equals_transformers(reference_model: LlamaForCausalLM, alone: Outcomes) -> None:
    """The lone answers are the measure of all others, so they are measured themselves."""
    for work in all_requests():
        outcome, start = alone[work.uid], len(work.token_ids) - 1
        with torch.no_grad():
            logits = reference_model(torch.tensor([work.token_ids + outcome.tokens])).logits[0]
        scores = logits.log_softmax(-1)
        found = [*outcome.prompt_logprobs[1:], *outcome.logprobs]
        tokens = [*work.token_ids[1:], *outcome.tokens]
        first = 0 if outcome.prompt_logprobs else start
        for place, each in enumerate(found, start=first):
            assert each is not None and each.chosen.token == tokens[place]
            for entry in (each.chosen, *each.top):
                assert abs(entry.logprob - float(scores[place, entry.token])) < 1e-4
            best = scores[place].topk(len(each.top)).indices.tolist() if each.top else []
            assert [entry.token for entry in each.top] == best
        params = work.params
        if params.temperature == 0 and not params.logit_bias and params.repetition_penalty == 1:
            greedy = logits[start:-1].argmax(-1).tolist() if outcome.tokens else []
            assert outcome.tokens == greedy
        assert not set(params.stop_token_ids) & set(outcome.tokens[: params.min_tokens])
    assert alone[23].end.matched == alone[23].tokens[9], "stops as soon as min_tokens lets it"


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("radix", (False, True))
@pytest.mark.parametrize("page_size", (1, 16))
@pytest.mark.parametrize("chunk", (0, 3, 16, 64))
def test_together_equals_alone(
    chunk: int, page_size: int, radix: bool, depth: int, facts: ModelFacts, alone: Outcomes
) -> None:
    """All at once, twice: the second time the cache is warm."""
    setting = Setting(chunk=chunk, page_size=page_size, radix=radix, depth=depth)
    with engine(facts, setting) as made:
        cold = made.run(*in_waves(all_requests()))
        expect_equal(cold, alone)
        if not radix:
            assert num_cached(cold) == 0
            return
        warm = made.run(*in_waves(again(all_requests(), 100)))
        expect_equal(warm, alone, shift=100)
        assert num_cached(warm) > 1.5 * num_cached(cold) > 0
        assert {warm[109].end.usage.cached_tokens, warm[125].end.usage.cached_tokens} == {0}


@pytest.mark.parametrize(
    ("chunk", "page_size", "radix", "depth"),
    list(product((0, 3), (1, 16), (False, True), (0, 1))),
)
def test_retraction_resumes_exactly(
    chunk: int, page_size: int, radix: bool, depth: int, facts: ModelFacts, alone: Outcomes
) -> None:
    """The pool holds about two of the long requests, which all want to grow at once."""
    setting = Setting(chunk=chunk, page_size=page_size, radix=radix, depth=depth, kv_tokens=256)
    chosen = [*long_requests(), *(each for each in all_requests() if each.uid in (9, 20, 23, 27))]
    with engine(facts, setting) as made:
        found = made.run(chosen)
        expect_equal(found, alone)
        assert num_retractions(found) > 0
        if radix:
            assert made.num_evicted > 0


@pytest.mark.parametrize("eviction", ("lru", "lfu"))
@pytest.mark.parametrize("page_size", (1, 16))
def test_eviction_changes_nothing(
    eviction: str, page_size: int, facts: ModelFacts, alone: Outcomes
) -> None:
    """Two rounds through a pool that cannot keep one of them."""
    setting = replace(USUAL, eviction=eviction, page_size=page_size, kv_tokens=512)
    with engine(facts, setting) as made:
        for shift in (0, 100):
            found = made.run(*in_waves(again(all_requests(), shift)))
            expect_equal(found, alone, shift)
            assert num_cached(found) > 0
        assert made.num_evicted * page_size > 512


def test_the_order_of_admission_changes_nothing(facts: ModelFacts, alone: Outcomes) -> None:
    orders = []
    short = [work for work in all_requests() if work.uid > 4]
    for policy in ("fcfs", "longest-prefix", "priority"):
        with engine(facts, replace(USUAL, policy=policy, max_running=2)) as made:
            expect_equal(made.run(*in_waves(short)), alone)
            orders.append(made.started)
    assert orders[0] != orders[1] != orders[2] != orders[0], "else this test says nothing"


@pytest.mark.parametrize(("page_size", "depth"), [(1, 0), (16, 1)])
def test_a_talk_goes_on_from_its_own_pages(
    page_size: int, depth: int, facts: ModelFacts, alone: Outcomes
) -> None:
    """The second turn's prompt holds the first one's answer, whose KV was written token by token."""
    turns = [
        ask(work.uid, work.token_ids + alone[work.uid].tokens + words(work.uid + 50, 5), 8)
        for work in all_requests()
    ]
    with engine(facts, Setting(max_running=1, max_step_tokens=512)) as fresh:
        expected = {}
        for work in turns:
            expected.update(fresh.run([work]))
    with engine(facts, replace(USUAL, page_size=page_size, depth=depth)) as made:
        made.run(*in_waves(all_requests()))
        found = made.run(again(turns, 200))
        expect_equal(found, expected, shift=200)
    cached = found[201].end.usage.cached_tokens
    assert 110 - page_size <= cached < 110  # of 10 + 100; the last token's KV was never computed


@pytest.mark.parametrize("depth", (0, 1))
def test_aborts_hand_pages_on_and_disturb_nobody(
    depth: int, facts: ModelFacts, alone: Outcomes
) -> None:
    setting = replace(USUAL, depth=depth, kv_tokens=512, max_running=6, chunk=3)
    gone = {2, 7, 9, 12, 15, 18, 29}
    with engine(facts, setting) as made:
        made.scheduler.turn(all_requests())
        for uid in sorted(gone):
            made.scheduler.turn([])
            made.scheduler.turn([AbortWork(uid=uid)])
        made.run()
        assert {uid for uid, each in made.outcomes.items() if each.end.reason == "abort"} <= gone
        assert made.outcomes[2].end.reason == "abort"
        rest = {uid: each for uid, each in made.outcomes.items() if uid not in gone}
    assert len(rest) == len(alone) - len(gone)
    expect_equal(rest, alone)


@pytest.mark.parametrize("num_threads", (1, 2))
def test_threads_change_nothing(num_threads: int, facts: ModelFacts, alone: Outcomes) -> None:
    with engine(facts, replace(USUAL, num_threads=num_threads)) as made:
        expect_equal(made.run(*in_waves(all_requests())), alone)


def test_the_reference_kernels_say_the_same(facts: ModelFacts, alone: Outcomes) -> None:
    with engine(facts, replace(USUAL, implementation="reference")) as made:
        expect_equal(made.run(*in_waves(all_requests())), alone)
