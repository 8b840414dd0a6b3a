"""Grammar masks in the sampler, against plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kernels.token_mask import select
from srt.protocols.forward_batch import RowSetup
from srt.sampling.masks import forbid_unmasked
from srt.sampling.sampler import Sampler
from srt.wire.params import SamplingParams


def pack(tokens: set[int], vocab: int) -> bytes:
    mask = bytearray(-(-vocab // 8))
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def opened(vocab: int, *params: SamplingParams) -> Sampler:
    sampler = Sampler(len(params), vocab)
    sampler.open(
        [
            RowSetup(row=row, params=each, tokens=[1, 2], prompt_len=2, stop_ids=[5])
            for row, each in enumerate(params)
        ]
    )
    return sampler


def noise(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 64, 1000, 1003])
def test_masked_logits_are_gone_and_the_others_untouched(vocab: int) -> None:
    chance = random.Random(vocab)
    logits = noise(5, vocab)
    before = logits.clone()
    allowed = [
        None if row == 3 else {t for t in range(vocab) if chance.random() < 0.3} for row in range(5)
    ]
    masks = [None if each is None else pack(each, vocab) for each in allowed]
    forbid_unmasked(logits, masks, select("torch"))
    for row, each in enumerate(allowed):
        for token in range(vocab):
            kept = each is None or token in each
            assert float(logits[row, token]) == (float(before[row, token]) if kept else -math.inf)


def test_no_rule_lifts_a_forbidden_token() -> None:
    vocab, allowed = 40, {3, 9, 30}
    masks: list[bytes | None] = [pack(allowed, vocab), None]
    rules = {"logit_bias": {7: 100.0, 9: 50.0}, "repetition_penalty": 0.5, "seed": 1}
    for temperature in (0.0, 1.0, 2.0):
        sampler = opened(
            vocab,
            SamplingParams(temperature=temperature, **rules),  # type: ignore[arg-type]
            SamplingParams(temperature=temperature, **rules),  # type: ignore[arg-type]
        )
        for seed in range(20):
            tokens = sampler.sample(noise(2, vocab, seed), [0, 1], masks).tokens.tolist()
            assert tokens == [9, 7]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.5, seed=3),
        SamplingParams(temperature=1.0, top_k=2, seed=3),
        SamplingParams(temperature=1.0, top_p=0.2, seed=3),
        SamplingParams(temperature=1.0, min_p=0.5, frequency_penalty=1.0, seed=3),
    ],
)
def test_a_mask_is_the_same_as_banning_the_rest(params: SamplingParams) -> None:
    """And the noise of a position does not depend on it."""
    vocab, chance = 200, random.Random(1)
    masked, plain = opened(vocab, params), opened(vocab, params)
    for seed in range(30):
        allowed = {t for t in range(vocab) if chance.random() < 0.1} | {0}
        logits = noise(1, vocab, seed)
        banned = logits.clone()
        banned[0, [t for t in range(vocab) if t not in allowed]] = -math.inf
        found = masked.sample(logits, [0], [pack(allowed, vocab)]).tokens.tolist()
        assert found == plain.sample(banned, [0]).tokens.tolist()
        assert found[0] in allowed


def test_logprobs_are_those_of_the_raw_logits() -> None:
    vocab = 50
    logits = noise(1, vocab)
    expected = logits.log_softmax(-1)[0]
    sampler = opened(vocab, SamplingParams(temperature=0.0, logprobs=3))
    sampled = sampler.sample(logits.clone(), [0], [pack({4}, vocab)])
    found = sampled.logprobs[0]
    assert sampled.tokens.tolist() == [4] and found is not None
    assert found.chosen.logprob == pytest.approx(float(expected[4]), abs=1e-5)
    assert [entry.token for entry in found.top] == expected.argsort(descending=True)[:3].tolist()


def test_bans_on_all_that_is_permitted_fail_that_request_only() -> None:
    """Also the end tokens that `min_tokens` holds back."""
    vocab = 50
    sampler = opened(
        vocab,
        SamplingParams(logit_bias={4: -100.0}),
        SamplingParams(min_tokens=2, seed=1),
        SamplingParams(temperature=0.0),
    )
    sampled = sampler.sample(
        noise(3, vocab), [0, 1, 2], [pack({4}, vocab), pack({5}, vocab), pack({6}, vocab)]
    )
    assert sampled.errors[2] is None and int(sampled.tokens[2]) == 6
    for error in sampled.errors[:2]:
        assert error is not None and "forbidden" in error
