"""The draw: exact probabilities, independence, and nothing but (seed, position) decides."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.sample.noise import exponential, position_keys, seed_keys
from srt.protocols.forward_batch import RowSetup
from srt.sampling.sampler import Sampler
from srt.wire.params import SamplingParams

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def setup(row: int, params: SamplingParams) -> RowSetup:
    return RowSetup(row=row, params=params, tokens=[1, 2], prompt_len=2, stop_ids=[])


def chi_square(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How many standard deviations the statistic lies above its mean (normal approximation)."""
    expected = probabilities.double() * observed.sum()
    common = expected >= 5
    rest = ~common
    terms = ((observed[common] - expected[common]) ** 2 / expected[common]).sum()
    bins = int(common.sum())
    if float(expected[rest].sum()) >= 5:
        terms += (observed[rest].sum() - expected[rest].sum()) ** 2 / expected[rest].sum()
        bins += 1
    return (float(terms) - (bins - 1)) / (2 * (bins - 1)) ** 0.5


@pytest.mark.parametrize(
    ("params", "vocab"),
    [
        (SamplingParams(), 20),
        (SamplingParams(), 300),
        (SamplingParams(temperature=0.6), 300),
        (SamplingParams(temperature=1.7, top_k=30), 300),
        (SamplingParams(top_p=0.8), 300),
        (SamplingParams(min_p=0.05), 64 * 80),
        (SamplingParams(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01), 64 * 80),
    ],
)
def test_tokens_come_as_often_as_they_should(params: SamplingParams, vocab: int) -> None:
    num_rows, num_steps = 256, 60
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    p = (logits.double() / params.temperature).softmax(-1)
    order = p.argsort(descending=True)
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        before = p[order].cumsum(-1) - p[order]
        p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    sampler = Sampler(num_rows, vocab)
    plain = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    sampler.open([setup(row, SamplingParams(seed=row, **plain)) for row in range(num_rows)])
    counts = torch.zeros(vocab, dtype=torch.float64)
    for _ in range(num_steps):
        tokens = sampler.sample(logits.expand(num_rows, -1).clone(), list(range(num_rows))).tokens
        counts += tokens.bincount(minlength=vocab)
    assert float(counts[p == 0].sum()) == 0
    assert abs(chi_square(counts, p)) < 4


def test_equal_tokens_come_equally_often() -> None:
    """Would see noise shared between a block and a token with the same number."""
    vocab, num_rows = 300, 256
    sampler = Sampler(num_rows, vocab)
    sampler.open([setup(row, SamplingParams(seed=row)) for row in range(num_rows)])
    counts = torch.zeros(vocab, dtype=torch.float64)
    for _ in range(60):
        tokens = sampler.sample(torch.zeros(num_rows, vocab), list(range(num_rows))).tokens
        counts += tokens.bincount(minlength=vocab)
    assert abs(chi_square(counts, torch.full((vocab,), 1.0 / vocab))) < 4


def test_positions_of_one_seed_are_independent() -> None:
    """Pairs of neighbouring draws of consecutive seeds fill the square evenly."""
    vocab, num_rows = 8, 128
    sampler = Sampler(num_rows, vocab)
    sampler.open([setup(row, SamplingParams(seed=row)) for row in range(num_rows)])
    steps = [
        sampler.sample(torch.zeros(num_rows, vocab), list(range(num_rows))).tokens
        for _ in range(81)
    ]
    tokens = torch.stack(steps)
    for other in (tokens[1:], tokens[:-1].roll(1, dims=1)):  # the next position, the next seed
        pairs = (tokens[:-1] * vocab + other).flatten().bincount(minlength=vocab * vocab)
        uniform = torch.full((vocab * vocab,), 1.0 / vocab**2)
        assert abs(chi_square(pairs.double(), uniform)) < 4


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_batch_changes_nothing(num_threads: int) -> None:
    """Every row alone and in batches of changing size and order: the same tokens."""
    mixes = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=20, temperature=1.5),
        SamplingParams(min_p=0.1, presence_penalty=1.0),
        SamplingParams(top_p=0.99, top_k=300),
        SamplingParams(repetition_penalty=1.2, logit_bias={3: 2.0}),
    ]
    vocab, num_rows, num_steps = 64 * 100 + 5, 21, 4
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        setups = []
        for row in range(num_rows):
            fields = {f: getattr(mixes[row % 7], f) for f in mixes[0].__struct_fields__}
            setups.append(setup(row, SamplingParams(**{**fields, "seed": 1000 + row})))
        generator = torch.Generator().manual_seed(2)
        logits = torch.randn(num_steps, num_rows, vocab, generator=generator) * 3
        alone = Sampler(num_rows, vocab)
        alone.open(setups)
        expected = [
            [
                int(alone.sample(logits[i, r : r + 1].clone(), [r]).tokens[0])
                for r in range(num_rows)
            ]
            for i in range(num_steps)
        ]
        together = Sampler(num_rows, vocab)
        together.open(setups)
        shuffler = random.Random(3)
        for step in range(num_steps):
            order = list(range(num_rows))
            shuffler.shuffle(order)
            cut = shuffler.randrange(1, num_rows)
            for part in (order[:cut], order[cut:]):
                tokens = together.sample(logits[step, part].clone(), part).tokens.tolist()
                assert tokens == [expected[step][row] for row in part]
    finally:
        torch.set_num_threads(before)


def test_seeds_differ_and_repeat() -> None:
    def run(seed: int) -> list[int]:
        sampler = Sampler(1, 500)
        sampler.open([setup(0, SamplingParams(seed=seed))])
        return [int(sampler.sample(torch.zeros(1, 500), [0]).tokens[0]) for _ in range(20)]

    assert run(1) == run(1) != run(2)
    assert run(-1) == run(MASK) != run((1 << 63) - 1)


def test_extreme_temperatures() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.999, -3.0]])
    for temperature, allowed in [(1e-5, {1}), (1e-40, {1}), (1e6, {0, 1, 2, 3})]:
        sampler = Sampler(1, 4)
        sampler.open([setup(0, SamplingParams(temperature=temperature, seed=1))])
        drawn = {int(sampler.sample(logits.clone(), [0]).tokens[0]) for _ in range(60)}
        assert drawn == allowed


def mix_by_reference(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_the_documented_formula() -> None:
    golden = 0x9E3779B97F4A7C15
    # SplitMix64 seeded with 1234567 is known to begin like this
    assert mix_by_reference((1234567 + golden) & MASK) == 6457827717110365317
    for seed, position, counter in [(0, 0, 0), (7, 3, 49151), (MASK, 100000, 1 << 40), (-5, 1, 2)]:
        key = mix_by_reference((mix_by_reference(seed & MASK) + (position + 1) * golden) & MASK)
        bits = mix_by_reference((key + (counter + 1) * golden) & MASK)
        uniform = torch.tensor(((bits >> 12) + 0.5) / 2**52, dtype=torch.float64)
        keys = position_keys(seed_keys([seed], CPU), torch.tensor([position]))
        assert int(keys[0]) & MASK == key
        noise = exponential(keys, torch.tensor([[counter]]))
        assert torch.allclose(noise[0, 0], -uniform.log(), rtol=1e-12)
