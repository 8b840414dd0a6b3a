"""The sampler that launches gives the tokens of the one that waits: every rule, any batch, any order."""

from __future__ import annotations

import random

import pytest
import torch

from srt.protocols.forward_batch import RowSetup
from srt.sampling.device_sampler import DeviceSampler
from srt.sampling.sampler import Sampler
from srt.wire.params import SamplingParams

STOPS = [2, 5]


def some_params(rng: random.Random, vocab: int, *, plain: bool = False) -> SamplingParams:
    special = {} if plain else {
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3, 0.8]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.7]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.5, -0.4]),
        "logit_bias": rng.choice([{}, {}, {1: -100.0, vocab - 1: 4.0}]),
        "min_tokens": rng.choice([0, 0, 3]),
        "logprobs": rng.choice([None, None, 0, 3]),
        "logprobs_mode": rng.choice(["raw", "processed"]),
    }  # fmt: skip
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 40, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.0, 0.5, 0.9, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        seed=rng.getrandbits(63),
        **special,
    )


def setups(params: list[SamplingParams], tokens: list[int], prompt_len: int) -> list[RowSetup]:
    return [
        RowSetup(row=row, params=each, tokens=tokens, prompt_len=prompt_len, stop_ids=STOPS)
        for row, each in enumerate(params)
    ]


def some_mask(rng: random.Random, vocab: int) -> bytes | None:
    if rng.random() < 0.5:
        return None
    return bytes(rng.randrange(256) | 1 for _ in range(-(-vocab // 8)))


def ints(rows: list[int], padding: int = 0, row: int = 0) -> torch.Tensor:
    return torch.tensor([*rows, *[row] * padding], dtype=torch.int32)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("vocab", [8, 200, 5000])
def test_tokens_logprobs_and_errors_are_those_of_the_sampler_that_waits(
    seed: int, vocab: int
) -> None:
    """12 steps of 6 rows that come and go; padded batches; grammars in every other case."""
    rng = random.Random(1000 * vocab + seed)
    noise = torch.Generator().manual_seed(seed)
    size = 6
    params = [some_params(rng, vocab, plain=seed % 4 == 3) for _ in range(size)]
    prompt = [rng.randrange(vocab) for _ in range(5)]
    waiting, launching = Sampler(size, vocab), DeviceSampler(size, vocab, "cpu")
    for sampler in (waiting, launching):
        sampler.open(setups(params, prompt, 3))
    for step in range(12):
        rows = rng.sample(range(size), rng.randrange(1, size + 1))
        if step == 6:
            params[rows[0]] = some_params(rng, vocab)
            again = setups(params, prompt, 4)[rows[0] : rows[0] + 1]
            waiting.open(again)
            launching.open(again)
        logits = torch.randn(len(rows) + 2, vocab, generator=noise) * rng.choice([0.3, 2.0, 7.0])
        if rng.random() < 0.2:
            logits = logits.round()
        if rng.random() < 0.2:
            logits[0, vocab // 2] = rng.choice([float("nan"), float("inf")])
        masks = [some_mask(rng, vocab) for _ in rows] if seed % 2 else None
        expected = waiting.sample(logits[: len(rows)].clone(), rows, masks)
        launched = launching.launch(logits, rows, ints(rows, 2, size), masks)
        found = launched.finish()
        assert found.tokens == expected.tokens.tolist() == launched.tokens.tolist()
        assert found.errors == expected.errors
        assert repr(found.logprobs) == repr(expected.logprobs)  # NaN equals itself there


def test_steps_are_launched_before_earlier_ones_are_finished() -> None:
    rng, vocab = random.Random(4), 300
    params = [some_params(rng, vocab) for _ in range(4)]
    logits = [torch.randn(4, vocab) * 2 for _ in range(8)]
    waiting, launching = Sampler(4, vocab), DeviceSampler(4, vocab, "cpu")
    for sampler in (waiting, launching):
        sampler.open(setups(params, [7, 8], 2))
    rows = [0, 1, 2, 3]
    launched = [launching.launch(each.clone(), rows, ints(rows)) for each in logits]
    expected = [waiting.sample(each.clone(), rows).tokens.tolist() for each in logits]
    assert [each.finish().tokens for each in launched] == expected


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    rng, vocab = random.Random(5), 700
    params = [some_params(rng, vocab, plain=True) for _ in range(8)]
    logits = torch.randn(8, vocab) * 2

    def draws(batches: list[list[int]]) -> dict[int, int]:
        sampler = DeviceSampler(8, vocab, "cpu")
        sampler.open(setups(params, [1], 1))
        found = {}
        for rows in batches:
            launched = sampler.launch(logits[rows], rows, ints(rows))
            found.update(zip(rows, launched.finish().tokens, strict=True))
        return found

    together = draws([list(range(8))])
    assert draws([[row] for row in range(8)]) == together
    assert draws([[5, 0, 7], [1, 2, 6, 4, 3]]) == together


def test_a_resumed_and_a_rolled_back_row_equal_an_undisturbed_one() -> None:
    params = SamplingParams(seed=5, repetition_penalty=1.4, frequency_penalty=0.5, top_p=0.9)
    logits = [torch.randn(1, 50, generator=torch.Generator().manual_seed(i)) for i in range(20)]

    def run(sampler: DeviceSampler, start: int, end: int) -> list[int]:
        return [
            sampler.launch(logits[i].clone(), [0], ints([0])).finish().tokens[0]
            for i in range(start, end)
        ]

    def opened(tokens: list[int]) -> DeviceSampler:
        sampler = DeviceSampler(1, 50, "cpu")
        sampler.open(setups([params], tokens, 3))
        return sampler

    whole = run(opened([1, 2, 3]), 0, 20)
    assert run(opened([1, 2, 3, *whole[:8]]), 8, 20) == whole[8:]
    back = opened([1, 2, 3])
    run(back, 0, 9)
    back.rollback(0, 4)
    back.advance(0, whole[5:7])
    assert run(back, 7, 20) == whole[7:]


def test_bfloat16_logits_are_their_numbers() -> None:
    rng, vocab = random.Random(6), 900
    params = [some_params(rng, vocab) for _ in range(6)]
    logits = (torch.randn(6, vocab) * 3).bfloat16()
    rows, found = list(range(6)), []
    for lines in (logits, logits.float()):
        sampler = DeviceSampler(6, vocab, "cpu")
        sampler.open(setups(params, [1, 2], 1))
        found.append(sampler.launch(lines.clone(), rows, ints(rows)).finish())
    assert found[0].tokens == found[1].tokens and found[0].logprobs == found[1].logprobs


def test_what_a_row_would_draw_later_is_what_it_draws_then() -> None:
    rng, vocab, size, depth = random.Random(7), 60, 5, 4
    params = [some_params(rng, vocab, plain=True) for _ in range(size)]
    sampler = DeviceSampler(size, vocab, "cpu")
    sampler.open(setups(params, [1, 2], 1))
    rows = rng.sample(range(size), size)
    logits = torch.randn(size, depth, vocab) * 2
    places = torch.arange(depth).repeat(size)
    ahead = sampler.sample_at(logits.view(-1, vocab), ints(rows).repeat_interleave(depth), places)
    assert sampler.generated(ints(rows)).tolist() == [1] * size
    for at in range(depth):
        launched = sampler.launch(logits[:, at].clone(), rows, ints(rows))
        assert launched.tokens.tolist() == ahead.tokens.view(size, depth)[:, at].tolist()


def test_what_is_special_goes_the_slow_way() -> None:
    params = [SamplingParams(), SamplingParams(logprobs=1), SamplingParams(top_p=0.5)]
    sampler = DeviceSampler(3, 10, "cpu")
    sampler.open(setups(params, [1], 1))
    assert sampler.is_plain([0, 2]) and not sampler.is_plain([0, 1])
    sampler.open(setups(params[:1] * 2, [1], 1)[1:])
    assert sampler.is_plain([0, 1])
