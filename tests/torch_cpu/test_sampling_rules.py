"""Each sampling rule against a reference of a few lines, greedy exactness, bans, state and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels.best_token import best_token
from kernels.sample.race import BLOCK, token_weights
from kernels.sample.truncate import Truncation, draw_truncated, keep_likely
from srt.protocols.forward_batch import RowSetup
from srt.sampling.sampler import Sampler
from srt.wire.params import SamplingParams

V = 1000


def opened(
    *params: SamplingParams, tokens: Any = (1, 2, 3), vocab: int = V, **setup: Any
) -> Sampler:
    sampler = Sampler(len(params), vocab)
    stop_ids = setup.pop("stop_ids", [])
    prompt_len = setup.pop("prompt_len", len(tokens))
    sampler.open(
        [
            RowSetup(
                row=row, params=each, tokens=list(tokens), prompt_len=prompt_len, stop_ids=stop_ids
            )
            for row, each in enumerate(params)
        ]
    )
    return sampler


def noisy(rows: int, vocab: int = V, scale: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kept_by_reference(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """top_k, top_p, min_p on one row, in float64, one token at a time."""
    p = logits.double().softmax(-1)
    order = p.argsort(descending=True).tolist()
    if top_k:
        order = order[:top_k]
    total, mass, kept = float(p[order].sum()), 0.0, []
    for token in order:
        kept.append(token)
        mass += float(p[token])
        if top_p < 1 and mass >= top_p * total:
            break
    return {token for token in kept if p[token] >= min_p * p[order[0]]}


@pytest.mark.parametrize("vocab", [3, 64, 1000, 64 * 200, 64 * 200 + 7])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (100, 1.0, 0.0),
        (0, 0.5, 0.0),
        (0, 0.95, 0.0),
        (0, 0.0, 0.0),
        (0, 1.0, 0.1),
        (0, 1.0, 1.0),
        (40, 0.8, 0.0),
        (40, 0.9, 0.05),
        (100000, 0.9, 0.0),
    ],
)
def test_truncation_keeps_what_the_reference_keeps(
    vocab: int, top_k: int, top_p: float, min_p: float
) -> None:
    for scale in (0.3, 2.0, 6.0):  # flat rows need the whole vocabulary, peaked ones a few blocks
        logits = noisy(3, vocab, scale)
        weights = token_weights(logits, logits.amax(-1), torch.ones(3, 1))
        rules = Truncation(
            top_k=torch.full((3, 1), top_k),
            top_p=torch.full((3, 1), top_p, dtype=torch.float64),
            min_p=torch.full((3, 1), min_p),
            max_top_k=top_k,
        )
        for num in {weights.shape[1], min(64, weights.shape[1])}:
            blocks, kept, is_exact = keep_likely(weights, rules, num)
            assert num < weights.shape[1] or bool(is_exact.all())
            for row in range(3):
                if not is_exact[row]:
                    continue
                ids = (blocks[row][:, None] * BLOCK + torch.arange(BLOCK))[kept[row] > 0]
                assert set(ids.tolist()) == kept_by_reference(logits[row], top_k, top_p, min_p)


def test_rows_that_few_blocks_cannot_settle_are_done_again() -> None:
    """A flat row and a peaked row together give what each gives with all blocks looked at."""
    logits = torch.cat([noisy(1, 64 * 200, 0.1), noisy(1, 64 * 200, 8.0)])
    weights = token_weights(logits, logits.amax(-1), torch.ones(2, 1))
    rules = Truncation(
        top_k=torch.zeros(2, 1, dtype=torch.int64),
        top_p=torch.full((2, 1), 0.9, dtype=torch.float64),
        min_p=torch.zeros(2, 1),
        max_top_k=0,
    )
    assert keep_likely(weights, rules, 64)[2].tolist() == [False, True]
    keys = torch.tensor([11, 12])
    both = draw_truncated(weights, rules, keys)
    wide = Truncation(top_k=rules.top_k, top_p=rules.top_p, min_p=rules.min_p, max_top_k=9999)
    assert both.tolist() == draw_truncated(weights, wide, keys).tolist()


def test_equal_tokens_at_the_border_are_all_kept() -> None:
    logits = torch.zeros(1, 128)
    logits[0, 5] = 3.0
    weights = token_weights(logits, logits.amax(-1), torch.ones(1, 1))
    rules = Truncation(
        top_k=torch.tensor([[2]]),
        top_p=torch.ones(1, 1, dtype=torch.float64),
        min_p=torch.zeros(1, 1),
        max_top_k=2,
    )
    assert int((keep_likely(weights, rules, 2)[1] > 0).sum()) == 128


@pytest.mark.parametrize("vocab", [5, 64, 65, 1000, 4096])
def test_the_arg_max_is_the_first_one(vocab: int) -> None:
    logits = noisy(50, vocab).mul(2).round()  # full of ties
    values, tokens = best_token(logits)
    assert torch.equal(values, logits.amax(-1)) and torch.equal(tokens, logits.argmax(-1))


def penalised_by_reference(
    row: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> torch.Tensor:
    row = row.clone()
    for token in set(prompt + output):
        r = params.repetition_penalty
        row[token] = row[token] / r if row[token] > 0 else row[token] * r
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return row


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(temperature=0, repetition_penalty=0.8),
        SamplingParams(temperature=0, frequency_penalty=2.0),
        SamplingParams(temperature=0, frequency_penalty=-2.0),
        SamplingParams(temperature=0, presence_penalty=1.5),
        SamplingParams(
            temperature=0, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.7
        ),
    ],
)
def test_greedy_with_penalties_is_exact_over_a_long_output(params: SamplingParams) -> None:
    """200 steps in a small vocabulary, next to rows with other parameters that come and go."""
    prompt, vocab = [3, 3, 9, 11], 40
    sampler = opened(params, SamplingParams(temperature=0), tokens=prompt, vocab=vocab)
    output: list[int] = []
    base = noisy(1, vocab, 1.0)[0]
    for step in range(200):
        drift = base + 0.5 * noisy(1, vocab, 1.0, seed=step)[0]
        logits = torch.stack([drift, drift])
        rows = [0, 1] if step % 3 else [0]
        sampled = sampler.sample(logits[: len(rows)].clone(), rows)
        expected = penalised_by_reference(drift, prompt, output, params)
        assert int(sampled.tokens[0]) == int(expected.argmax())
        if len(rows) == 2:
            assert int(sampled.tokens[1]) == int(drift.argmax())
        output.append(int(sampled.tokens[0]))


def test_a_resumed_row_and_a_rolled_back_row_equal_an_undisturbed_one() -> None:
    params = SamplingParams(
        seed=5, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.5, top_p=0.9
    )
    logits = [noisy(1, 50, 1.0, seed=step) for step in range(30)]

    def run(sampler: Sampler, start: int, end: int) -> list[int]:
        return [int(sampler.sample(logits[i].clone(), [0]).tokens[0]) for i in range(start, end)]

    whole = run(opened(params, vocab=50), 0, 30)
    resumed = opened(params, tokens=[1, 2, 3, *whole[:12]], prompt_len=3, vocab=50)
    assert run(resumed, 12, 30) == whole[12:]
    back = opened(params, vocab=50)
    run(back, 0, 9)
    back.sample(torch.eye(50)[:1] * 1e4, [0])  # three tokens that will not have been
    for _ in range(2):
        back.sample(torch.eye(50)[7:8] * 1e4, [0])
    back.rollback(0, 3)
    assert run(back, 9, 30) == whole[9:]


def test_a_token_rolled_back_is_unseen_again() -> None:
    sampler = opened(SamplingParams(temperature=0, repetition_penalty=2.0), vocab=10)
    for token in (0, 5, 0):
        sampler.sample(torch.eye(10)[token : token + 1] * 1e4, [0])
    sampler.rollback(0, 3)
    logits = torch.zeros(1, 10)
    logits[0, 0], logits[0, 7] = 5.0, 4.0
    assert [int(sampler.sample(logits.clone(), [0]).tokens[0]) for _ in range(2)] == [0, 7]


def test_a_row_forgets_its_former_request() -> None:
    heavy = SamplingParams(temperature=0, frequency_penalty=2.0, logit_bias={7: 50.0})
    sampler = opened(heavy)
    logits = noisy(1)
    for _ in range(5):
        sampler.sample(logits.clone(), [0])
    for params in (SamplingParams(temperature=0), heavy):
        sampler.open([RowSetup(row=0, params=params, tokens=[1], prompt_len=1, stop_ids=[])])
        fresh = opened(params, tokens=[1])
        for _ in range(5):
            expected = fresh.sample(logits.clone(), [0]).tokens
            assert torch.equal(sampler.sample(logits.clone(), [0]).tokens, expected)


def test_bias_is_added_and_minus_100_is_a_ban() -> None:
    logits = torch.zeros(1, V)
    logits[0, 3], logits[0, 4] = 500.0, 499.0
    for bias, expected in [({3: -100.0}, 4), ({3: -99.0}, 4), ({3: -0.5}, 3), ({9: 100.0}, 3)]:
        sampler = opened(SamplingParams(temperature=0, logit_bias=bias))
        assert int(sampler.sample(logits.clone(), [0]).tokens[0]) == expected
    drawn = opened(SamplingParams(seed=1, logit_bias={9: 100.0, 5: -100.0}))
    assert {int(drawn.sample(noisy(1, seed=i), [0]).tokens[0]) for i in range(50)} == {9}
    only = opened(SamplingParams(seed=1, logit_bias=dict.fromkeys(range(3), -100.0)), vocab=4)
    assert {int(only.sample(torch.ones(1, 4), [0]).tokens[0]) for _ in range(50)} == {3}
    lone = opened(SamplingParams(temperature=0, logit_bias={3: -100.0, 999: 1.0}))
    assert int(lone.sample(torch.full((1, V), -1.0), [0]).tokens[0]) == 999


@pytest.mark.parametrize("min_tokens", range(6))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_cannot_come_before_min_tokens(min_tokens: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, min_tokens=min_tokens)
    sampler = opened(params, stop_ids=[7, 8, 7])
    logits = torch.zeros(1, V)
    logits[0, 7] = logits[0, 8] = 60.0
    found = [int(sampler.sample(logits.clone(), [0]).tokens[0]) for _ in range(8)]
    assert [token in (7, 8) for token in found] == [i >= min_tokens for i in range(8)]


def test_min_tokens_counts_what_came_before_a_retraction() -> None:
    params = SamplingParams(temperature=0, min_tokens=3)
    sampler = opened(params, tokens=[1, 2, 5, 5], prompt_len=2, stop_ids=[7])
    logits = torch.zeros(1, V)
    logits[0, 7] = 60.0
    found = [int(sampler.sample(logits.clone(), [0]).tokens[0]) for _ in range(2)]
    assert found == [0, 7]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    params = [
        SamplingParams(temperature=0, logprobs=3, logit_bias={5: 90.0}, repetition_penalty=1.5),
        SamplingParams(temperature=0.3, seed=1, top_k=2),
        SamplingParams(temperature=2.0, seed=1, logprobs=0),
    ]
    logits = noisy(3)
    expected = logits.double().log_softmax(-1)
    sampled = opened(*params).sample(logits.clone(), [0, 1, 2])
    first, none, last = sampled.logprobs
    assert none is None and first is not None and last is not None
    assert first.chosen.token == 5 and last.top == []
    assert math.isclose(first.chosen.logprob, float(expected[0, 5]), abs_tol=1e-5)
    assert [each.token for each in first.top] == expected[0].topk(3).indices.tolist()
    for each in first.top:
        assert math.isclose(each.logprob, float(expected[0, each.token]), abs_tol=1e-5)
    chosen = int(sampled.tokens[2])
    assert last.chosen.token == chosen
    assert math.isclose(last.chosen.logprob, float(expected[2, chosen]), abs_tol=1e-5)


def test_scores_of_given_tokens() -> None:
    logits = noisy(4)
    expected = logits.double().log_softmax(-1)
    targets = torch.tensor([0, 5, 999, 7])
    scores = opened(SamplingParams()).score(logits, targets, 2)
    for row, (score, target) in enumerate(zip(scores, targets.tolist(), strict=True)):
        assert score.chosen.token == target and len(score.top) == 2
        assert math.isclose(score.chosen.logprob, float(expected[row, target]), abs_tol=1e-5)
    assert opened(SamplingParams()).score(logits[:0], targets[:0], 2) == []
    small = opened(SamplingParams(), vocab=3).score(torch.zeros(1, 3), torch.tensor([1]), 20)
    assert len(small[0].top) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_broken_row_hurts_nobody_else(temperature: float, top_p: float) -> None:
    params = [
        SamplingParams(temperature=temperature, top_p=top_p, seed=i, logprobs=1) for i in range(5)
    ]
    clean = noisy(5, 64 * 100)
    broken = clean.clone()
    broken[1, 17] = float("nan")
    broken[2] = float("-inf")
    broken[3, 4] = float("inf")
    good = opened(*params, vocab=6400).sample(clean, list(range(5)))
    bad = opened(*params, vocab=6400).sample(broken, list(range(5)))
    assert [error is None for error in bad.errors] == [True, False, False, False, True]
    assert "NaN" in str(bad.errors[1]) and "infinity" in str(bad.errors[3])
    assert "forbidden" in str(bad.errors[2])
    assert bad.tokens[1:4].tolist() == [0, 0, 0] and bad.logprobs[1:4] == [None] * 3
    for row in (0, 4):
        assert bad.tokens[row] == good.tokens[row] and bad.logprobs[row] == good.logprobs[row]


def test_a_broken_row_alone_is_reported_too() -> None:
    params = SamplingParams(top_p=0.9, seed=1)
    sampler = opened(params, vocab=6400)
    assert "NaN" in str(sampler.sample(torch.full((1, 6400), float("nan")), [0]).errors[0])
    assert sampler.sample(noisy(1, 6400), [0]).errors == [None]


def test_banning_everything_is_an_error_of_that_request() -> None:
    params = SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(4), -100.0))
    sampled = opened(params, SamplingParams(temperature=0), vocab=4).sample(
        torch.eye(4)[:2], [0, 1]
    )
    assert sampled.errors[0] is not None and sampled.errors[1] is None
    assert int(sampled.tokens[1]) == 1


def test_an_empty_batch_is_fine() -> None:
    sampled = opened(SamplingParams()).sample(torch.empty(0, V), [])
    assert len(sampled.tokens) == 0 and sampled.errors == []
