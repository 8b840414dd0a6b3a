"""`logprobs_mode: processed`: the distribution that a token was drawn from, against plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from srt.protocols.forward_batch import RowSetup
from srt.sampling.logprobs import largest
from srt.sampling.sampler import Sampler
from srt.wire.params import SamplingParams, TokenLogprobs

V = 300
PROMPT = [1, 2, 3]


def opened(*params: SamplingParams) -> Sampler:
    sampler = Sampler(len(params), V)
    sampler.open(
        [
            RowSetup(row=row, params=each, tokens=PROMPT, prompt_len=len(PROMPT), stop_ids=[])
            for row, each in enumerate(params)
        ]
    )
    return sampler


def noisy(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3.0


def reference(logits: list[float], params: SamplingParams, mask: set[int] | None) -> list[float]:
    """Every rule in its order, one token at a time, for the first token after `PROMPT`."""
    at = [x if mask is None or token in mask else -math.inf for token, x in enumerate(logits)]
    for token, bias in params.logit_bias.items():
        at[token] += bias if bias > -100 else -math.inf
    for token in set(PROMPT):
        r = params.repetition_penalty
        at[token] = at[token] / r if at[token] > 0 else at[token] * r
    if params.temperature > 0:
        at = [x / params.temperature for x in at]
        order = sorted(range(V), key=lambda token: -at[token])
        if params.top_k:
            order = order[: params.top_k]
        peak = max(at)
        weight = {token: math.exp(at[token] - peak) for token in order}
        total, mass, kept = sum(weight.values()), 0.0, set()
        for token in order:
            kept.add(token)
            mass += weight[token]
            if mass >= params.top_p * total:
                break
        at = [x if t in kept and math.exp(x - peak) >= params.min_p else -math.inf
              for t, x in enumerate(at)]  # fmt: skip
    peak = max(at)
    total = peak + math.log(sum(math.exp(x - peak) for x in at))
    return [x - total for x in at]


def check(found: TokenLogprobs | None, expected: list[float], token: int, num: int) -> None:
    assert found is not None and found.chosen.token == token and len(found.top) == num
    assert math.isfinite(found.chosen.logprob), "a token was drawn that could not be"
    for entry in (found.chosen, *found.top):
        wanted = expected[entry.token]
        same = entry.logprob == wanted == -math.inf
        assert same or math.isclose(entry.logprob, wanted, abs_tol=2e-5), (entry, wanted)
    values = [entry.logprob for entry in found.top]
    assert values == sorted(values, reverse=True)
    assert values[:1] == [] or math.isclose(values[0], max(expected), abs_tol=2e-5)


CASES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.1},  # neither counts for a greedy row
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 0.8, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.7, "logit_bias": {5: -100.0, 6: 4.0, 2: 7.5}},
    {"temperature": 0.0, "repetition_penalty": 0.6, "logit_bias": {1: 3.0, 9: -100.0}},
]


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("num", [0, 4, 20])
def test_processed_is_what_was_drawn_from(num: int, is_masked: bool) -> None:
    """All cases in one batch, between rows that ask for raw values or for none."""
    params = [
        SamplingParams(seed=i, logprobs=num, logprobs_mode="processed", **case)
        for i, case in enumerate(CASES)
    ]
    params += [SamplingParams(seed=50), SamplingParams(seed=51, logprobs=2, top_k=1)]
    rows = list(range(len(params)))
    allowed = set(range(0, V, 2))
    packed = bytes(sum(1 << bit for bit in (0, 2, 4, 6)) for _ in range(-(-V // 8)))
    masks: list[bytes | None] | None = [packed] * len(rows) if is_masked else None
    for seed in range(5):
        logits = noisy(len(rows), seed)
        sampled = opened(*params).sample(logits.clone(), rows, masks)
        for row in range(len(CASES)):
            expected = reference(logits[row].tolist(), params[row], allowed if is_masked else None)
            check(sampled.logprobs[row], expected, int(sampled.tokens[row]), num)
        assert sampled.logprobs[-2] is None
        raw = sampled.logprobs[-1]
        assert raw is not None
        wanted = float(logits[-1].log_softmax(-1)[raw.chosen.token])
        assert math.isclose(raw.chosen.logprob, wanted, abs_tol=2e-5)


def test_asking_for_them_changes_no_token() -> None:
    plain = [SamplingParams(seed=i, **case) for i, case in enumerate(CASES)]
    asking = [
        SamplingParams(seed=i, logprobs=1, logprobs_mode="processed", **case)
        for i, case in enumerate(CASES)
    ]
    rows = list(range(len(CASES)))
    first, second = opened(*plain), opened(*asking)
    for seed in range(10):
        logits = noisy(len(rows), seed)
        tokens = first.sample(logits.clone(), rows).tokens.tolist()
        assert second.sample(logits.clone(), rows).tokens.tolist() == tokens


def test_the_chances_are_those_of_the_draws() -> None:
    """Many draws with many seeds: how often a token comes is what its value says."""
    params = [
        SamplingParams(
            seed=i, temperature=0.7, top_k=4, logprobs=4, logprobs_mode="processed"
        )
        for i in range(4000)
    ]  # fmt: skip
    logits = noisy(1).expand(len(params), -1).clone()
    sampled = opened(*params).sample(logits, list(range(len(params))))
    first = sampled.logprobs[0]
    assert first is not None
    tokens = sampled.tokens.tolist()
    for entry in first.top:
        share = tokens.count(entry.token) / len(tokens)
        assert abs(share - math.exp(entry.logprob)) < 0.04
    assert math.isclose(sum(math.exp(entry.logprob) for entry in first.top), 1.0, abs_tol=1e-5)
    assert set(tokens) == {entry.token for entry in first.top}


def test_a_broken_row_has_none() -> None:
    params = [
        SamplingParams(seed=i, top_p=0.9, logprobs=1, logprobs_mode="processed") for i in range(2)
    ]
    logits = noisy(2)
    logits[0, 7] = float("nan")
    sampled = opened(*params).sample(logits, [0, 1])
    assert sampled.errors[0] is not None and sampled.logprobs[0] is None
    assert sampled.errors[1] is None and sampled.logprobs[1] is not None


def test_a_retracted_row_goes_on_with_the_same_values() -> None:
    params = SamplingParams(
        seed=3, temperature=0.9, top_p=0.8, repetition_penalty=1.4, frequency_penalty=0.5,
        logprobs=3, logprobs_mode="processed",
    )  # fmt: skip
    steady, tokens = opened(params), list(PROMPT)
    for step in range(6):
        again = Sampler(1, V)
        again.open(
            [RowSetup(row=0, params=params, tokens=tokens, prompt_len=len(PROMPT), stop_ids=[])]
        )
        logits = noisy(1, step)
        one, two = steady.sample(logits.clone(), [0]), again.sample(logits.clone(), [0])
        assert one.logprobs == two.logprobs and one.tokens.tolist() == two.tokens.tolist()
        tokens = [*tokens, *one.tokens.tolist()]


@pytest.mark.parametrize("vocab", [5, 64, 640, 1000, 6401])
@pytest.mark.parametrize("num", [0, 1, 5])
def test_the_largest_logits_are_found_block_by_block(vocab: int, num: int) -> None:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[2, 3:] = float("-inf")  # fewer left than asked for
    values, ids = largest(logits, num)
    assert torch.equal(values, logits.topk(num).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(line)) == num for line in ids.tolist())
