"""A small model served on the GPU: its answers are the CPU's, and no way of running it changes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_engine import (
    EAGER,
    MAX_RUNNING,
    Built,
    ask,
    batch,
    build,
    chosen,
    expect_near,
    expect_same,
    score,
)

BF16 = 0.15  # of a logprob, between sums that were rounded otherwise; wrong ones are off by units


def test_answers_are_those_of_the_cpu(engine: Built, model: Path, cache: str) -> None:
    """Every token of the GPU's greedy answers is the CPU's best in float32, or as good as it; and the
    CPU thinks as the GPU does of every token of prompt and answer."""
    works = [ask(n, 30 + 25 * n) for n in range(4)]
    answers = engine.run(works)
    scores = [score(work, answers[work.uid].tokens, 100 + work.uid) for work in works]
    ours = engine.run(scores)
    with build(model, cache, "--dtype", "float32", "--no-native-kernels", device="cpu") as cpu:
        theirs = cpu.run(scores)
    gaps = []
    for work in works:
        one, other = ours[100 + work.uid].prompt_logprobs, theirs[100 + work.uid].prompt_logprobs
        assert len(one) == len(other) == len(work.token_ids) + 24
        gaps += [abs(chosen(a) - chosen(b)) for a, b in zip(one[1:], other[1:], strict=True)]
        for entry in other[len(work.token_ids) :]:
            assert entry is not None
            assert entry.top[0].logprob - entry.chosen.logprob <= 2 * BF16
    assert max(gaps) <= 3 * BF16 and sum(gaps) / len(gaps) <= BF16 / 2


def test_recorded_steps_are_near_the_eager_ones(engine: Built, model: Path, cache: str) -> None:
    """Attention may split a row's keys otherwise when it does not know how many they will be; that they
    are the same to the bit where nothing depends on that is a test of --deterministic."""
    works = batch(temperature=0.0)
    with build(model, cache, *EAGER) as eager:
        expect_near(engine.run(works), eager.run(works), BF16, least=24)


def test_overlap_changes_nothing(engine: Built) -> None:
    works = batch()
    expect_same(engine.run(works, depth=1), engine.run(works))


def test_requests_that_come_and_go(engine: Built) -> None:
    """More than fit, of unlike lengths, some ended early by a stop token: batches of every size, padded
    and mixed with prompts. Nothing is lost, and everything is released."""
    works = [ask(n, 10 + 7 * n, answer=3 + 5 * (n % 7)) for n in range(3 * MAX_RUNNING)]
    lone = engine.run(works, max_running=1)
    for depth in (0, 1):
        crowd = engine.run(works[::2], works[1::2], depth=depth)
        expect_near(crowd, lone, BF16, least=len(works) * 3)
    stops = {uid: outcome.tokens[2] for uid, outcome in lone.items()}
    ended = [ask(n, 10 + 7 * n, stop_token_ids=[stops[n]]) for n in range(MAX_RUNNING)]
    outcomes = engine.run(ended, depth=1)
    for uid, outcome in outcomes.items():
        assert (outcome.end.reason == "stop") == (stops[uid] in outcome.tokens)
    assert sum(outcome.end.reason == "stop" for outcome in outcomes.values()) >= MAX_RUNNING / 2


@pytest.mark.parametrize("chunk", [16, 61])
def test_a_prompt_may_be_cut(engine: Built, chunk: int) -> None:
    works = batch(temperature=0.0)
    whole = engine.run(works, max_step_tokens=4096, chunked_prefill_size=4096)
    cut = engine.run(works, chunked_prefill_size=chunk, depth=1)
    expect_near(cut, whole, BF16, least=24)


def test_a_prefix_may_be_cached(engine: Built) -> None:
    works = batch(temperature=0.0)
    driver = engine.driver(radix_cache=True, depth=1)
    driver.run(works)
    again = [ask(100 + n, 1) for n in range(MAX_RUNNING)]
    for work, other in zip(again, works, strict=True):
        work.token_ids = other.token_ids
    cached = driver.run(again)
    assert sum(outcome.end.usage.cached_tokens for outcome in cached.values()) > 100
    fresh = engine.run(again)
    expect_near(cached, fresh, BF16, least=24)


def test_guesses_change_nothing(engine: Built, model: Path, cache: str) -> None:
    """Answers of three tokens only, so that there is something to guess, rightly and wrongly."""
    bias = {7: 50.0, 8: 50.0, 9: 50.0}
    works = [ask(n, 40, answer=48, logit_bias=bias) for n in range(4)]
    plain = engine.run(works)
    with build(model, cache, "--speculative-algorithm", "ngram") as guessing:
        found = guessing.run(works, draft_eager=True)
    usages = [outcome.end.usage for outcome in found.values()]
    drafted, accepted = (
        sum(u.drafted_tokens for u in usages),
        sum(u.accepted_tokens for u in usages),
    )
    assert 0 < accepted < drafted
    expect_near(found, plain, BF16, least=24)


def test_scores_and_constraints(engine: Built) -> None:
    """Bans, biases, penalties and minimum lengths, beside requests without any. A penalty of 100 leaves
    nothing of what was seen: of a thousand tokens some have a logit above zero."""
    banned = ask(1, 20, answer=8, logit_bias=dict.fromkeys(range(500), -100.0))
    pushed = ask(2, 20, answer=8, logit_bias={7: 100.0})
    spread = ask(3, 20, answer=24, repetition_penalty=100.0)
    plain = [ask(4 + n, 20, answer=24) for n in range(4)]  # any of them may begin with a tie
    found = engine.run([banned, pushed, spread, *plain], depth=1)
    assert all(token >= 500 for token in found[1].tokens)
    assert set(found[2].tokens) == {7}
    assert len({*spread.token_ids, *found[3].tokens}) == len(set(spread.token_ids)) + 24
    expect_near({work.uid: found[work.uid] for work in plain}, engine.run(plain), BF16, least=12)
