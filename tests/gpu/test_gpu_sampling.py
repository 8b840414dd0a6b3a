"""Sampling on the device at serving sizes: the reference's tokens, graphs, laws, nobody who waits."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kernels.sample import select
from kernels.sample.table import GENERATED, Drawn, table_row
from srt.protocols.forward_batch import RowSetup
from srt.sampling.device_sampler import DeviceSampler
from srt.sampling.sampler import Sampler
from srt.wire.params import SamplingParams

VOCAB = 151936
CUDA = torch.device("cuda")


def some_params(rng: random.Random, *, plain: bool) -> SamplingParams:
    special = {
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "presence_penalty": rng.choice([0.0, 0.7]),
        "logit_bias": rng.choice([{}, {5: -100.0, 77: 4.0}]),
        "min_tokens": rng.choice([0, 2]),
        "logprobs": rng.choice([None, 3]),
        "logprobs_mode": rng.choice(["raw", "processed"]),
    }
    return SamplingParams(
        temperature=rng.choice([0.0, 0.6, 1.0]),
        top_k=rng.choice([0, 1, 50, 1000]),
        top_p=rng.choice([1.0, 0.5, 0.9, 0.99]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.getrandbits(63),
        **({} if plain else special),
    )


def opened(sampler: DeviceSampler | Sampler, params: list[SamplingParams]) -> None:
    sampler.open(
        [
            RowSetup(row=row, params=each, tokens=[5, 6, 7, 9], prompt_len=3, stop_ids=[2])
            for row, each in enumerate(params)
        ]
    )


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Calls that wait for the device raise. torch warns that it does not know all of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("scale", [1.0, 4.0, 10.0])
def test_tokens_are_those_of_the_sampler_on_the_cpu(plain: bool, scale: float) -> None:
    """The last bit of a weight may differ, which changes a draw in very many."""
    rng, size = random.Random(int(scale)), 24
    params = [some_params(rng, plain=plain) for _ in range(size)]
    waiting, launching = Sampler(size, VOCAB), DeviceSampler(size, VOCAB, CUDA)
    opened(waiting, params)
    opened(launching, params)
    rows = list(range(size))
    there = torch.tensor(rows, dtype=torch.int32, device=CUDA)
    unlike = 0
    for _ in range(3):
        logits = torch.randn(size, VOCAB) * scale
        expected = waiting.sample(logits.clone(), rows)
        launched = launching.launch(logits.to(CUDA), rows, there)
        torch.cuda.synchronize()
        found = launched.finish()
        unlike += sum(a != b for a, b in zip(found.tokens, expected.tokens.tolist(), strict=True))
        if unlike:
            break  # penalties remember it
        for a, b in zip(found.logprobs, expected.logprobs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                likely = [e.token for e in b.top if e.logprob > float("-inf")]
                assert [e.token for e in a.top[: len(likely)]] == likely  # the rest are all equal
                assert a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4)
    assert unlike <= 1


def test_a_line_does_not_depend_on_its_company() -> None:
    rng = random.Random(1)
    params = [some_params(rng, plain=True) for _ in range(64)]
    logits = torch.randn(64, VOCAB, device=CUDA) * 3

    def draw(batch: list[int]) -> torch.Tensor:
        sampler = DeviceSampler(64, VOCAB, CUDA)
        opened(sampler, params)
        rows = torch.tensor(batch, dtype=torch.int32, device=CUDA)
        drawn = sampler.draw(logits[batch], rows, len(batch))
        return torch.stack([drawn.tokens, drawn.floors.view(torch.int32).long()])

    whole = draw(list(range(64)))
    for batch in ([0], [63], [5, 9, 2], list(range(40, 64))):
        assert torch.equal(draw(batch), whole[:, batch])


def test_a_recorded_draw_is_played_with_new_rows_and_logits() -> None:
    rng = random.Random(2)
    params = [some_params(rng, plain=True) for _ in range(8)]
    eager, recorded = DeviceSampler(8, VOCAB, CUDA), DeviceSampler(8, VOCAB, CUDA)
    opened(eager, params)
    opened(recorded, params)
    logits = torch.zeros(4, VOCAB, device=CUDA)
    rows = torch.full((4,), 8, dtype=torch.int32, device=CUDA)  # the row of nobody
    recorded.draw(logits, rows, 4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = recorded.draw(logits, rows, 4)
    for batch in ([0, 1, 2, 3], [7, 3, 8, 8], [4, 0, 5, 8]):
        logits.normal_(0, 3)
        rows.copy_(torch.tensor(batch))
        graph.replay()
        expected = eager.draw(logits.clone(), rows.clone(), 4)
        live = [place for place, row in enumerate(batch) if row < 8]
        assert drawn.tokens[live].tolist() == expected.tokens[live].tolist()


@pytest.mark.parametrize(
    "rules",
    [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}],
    ids=["free", "top_k", "top_p", "min_p"],
)
def test_draws_follow_the_law(rules: dict[str, float]) -> None:
    """100,000 draws from one distribution, chi-square against it."""
    num, vocab = 4096, 5000
    sample = select("triton")
    line = torch.randn(vocab, generator=torch.Generator().manual_seed(7)) * 4
    law = line.double().softmax(-1)
    order = law.argsort(descending=True)
    kept = torch.ones(vocab, dtype=torch.bool)
    if "top_k" in rules:
        kept[order[20:]] = False
    if "top_p" in rules:
        before = law[order].cumsum(-1) - law[order]
        kept[order[before >= 0.8]] = False
    if "min_p" in rules:
        kept &= law >= 0.1 * law.max()
    law = torch.where(kept, law, 0) / law[kept].sum()
    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **rules}
    table = torch.tensor([table_row(generated=0, seed=seed, **chosen) for seed in range(num)])
    table = table.to(CUDA)
    rows = torch.arange(num, dtype=torch.int32, device=CUDA)
    logits = line.to(CUDA).expand(num, -1).contiguous()
    counts = torch.zeros(vocab, device=CUDA)
    for _ in range(25):
        drawn = Drawn.empty(num, CUDA)
        sample(logits, rows, table, drawn)
        counts += drawn.tokens.bincount(minlength=vocab)
    assert (table[:, GENERATED] == 25).all()
    counts, expected = counts.cpu().double(), law * num * 25
    assert counts[~kept].sum() == 0
    big = expected >= 5
    rest = (counts[~big].sum() - expected[~big].sum()) ** 2 / expected[~big].sum().clamp_min(1)
    statistic = float(((counts[big] - expected[big]) ** 2 / expected[big]).sum() + rest)
    freedom = max(int(big.sum()), 1)
    assert (statistic - freedom) / (2 * freedom) ** 0.5 < 5


def test_what_a_row_would_draw_later_is_what_it_draws_then() -> None:
    rng, size, depth = random.Random(4), 12, 3
    sampler = DeviceSampler(size, VOCAB, CUDA)
    opened(sampler, [some_params(rng, plain=True) for _ in range(size)])
    there = torch.arange(size, dtype=torch.int32, device=CUDA)
    logits = torch.randn(size, depth, VOCAB, device=CUDA) * 3
    places = torch.arange(depth, device=CUDA).repeat(size)
    ahead = sampler.sample_at(logits.view(-1, VOCAB), there.repeat_interleave(depth), places)
    for at in range(depth):
        launched = sampler.launch(logits[:, at].clone(), list(range(size)), there)
        assert torch.equal(launched.tokens, ahead.tokens.view(size, depth)[:, at])


def test_nothing_in_a_launch_waits_for_the_device() -> None:
    """torch complains about every call that synchronizes."""
    rng, size = random.Random(3), 16
    params = [some_params(rng, plain=False) for _ in range(size)]
    sampler = DeviceSampler(size, VOCAB, CUDA)
    opened(sampler, params)
    rows = list(range(size))
    there = torch.tensor(rows, dtype=torch.int32, device=CUDA)
    masks = [None if row % 2 else b"\xff" * (-(-VOCAB // 8)) for row in rows]
    logits, offsets = torch.randn(size, VOCAB, device=CUDA), torch.arange(size, device=CUDA)
    plain = DeviceSampler(size, VOCAB, CUDA)
    opened(plain, [some_params(rng, plain=True) for _ in range(size)])

    def steps() -> None:
        for mask in (None, masks):
            sampler.launch(logits.clone(), rows, there, mask)
        plain.launch(logits, rows, there)
        plain.sample_at(logits, there, offsets)
        plain.count(there, offsets)
        opened(sampler, params[:3])

    steps()  # compiles
    torch.cuda.synchronize()
    with refusing_to_wait():
        steps()
    torch.cuda.synchronize()
