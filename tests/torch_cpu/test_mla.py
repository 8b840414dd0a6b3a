"""Forms of latent attention give the same, whatever is expanded, and bounded memory does it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kernels.merge_state import select
from srt.attention import mla_plan
from srt.attention.mla import MlaAttention
from srt.attention.mla_plan import (
    Chunk,
    MlaSettings,
    choose_form,
    count_parts,
    cut_keys,
    cut_prefixes,
)
from srt.attention.mla_sdpa import SdpaMla
from srt.cache.pools import LatentPool
from srt.layers.latent import LatentArch, UpProjection
from tests.latent_batches import HEADS, LATENT, PAGE, LatentBatch, literal

CAP = 24
PREFIXES = (0, 1, CAP - 1, CAP, 3 * CAP + 5)
NEW = 40  # enough to be worth expanding


def settings(**changes: object) -> MlaSettings:
    values = {"chunk_tokens": CAP, "may_expand": True, **changes}
    return MlaSettings(**values)  # type: ignore[arg-type]


def backend(case: LatentBatch, given: MlaSettings) -> MlaAttention:
    return MlaAttention(SdpaMla(), SdpaMla(), select("torch"), [case.up], given)


def run(case: LatentBatch, given: MlaSettings) -> tuple[torch.Tensor, MlaAttention]:
    attention = backend(case, given)
    attention.plan(case.batch)
    out = attention.forward(case.q, 0, case.pool, scale=LATENT.scale, window=None)
    return out, attention


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (settings(), "chunked"),
        (settings(chunk_tokens=7), "chunked"),
        (settings(chunk_tokens=4096), "one-shot"),
        (settings(may_expand=False), "absorbed"),
        (settings(deterministic=True), "absorbed"),
    ],
)
def test_every_form_is_the_literal_formula(given: MlaSettings, form: str) -> None:
    case = LatentBatch(starts=(5, 60, *PREFIXES), lengths=(1, 1, *[NEW] * len(PREFIXES)), decodes=2)
    out, attention = run(case, given)
    assert attention.form == form
    torch.testing.assert_close(out, literal(case), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefixes", [(0, 0), (0,), (3, 0, 0, 50)])
def test_prefixes_that_are_not_there(prefixes: Sequence[int]) -> None:
    case = LatentBatch(starts=tuple(prefixes), lengths=(NEW,) * len(prefixes))
    out, _ = run(case, settings())
    torch.testing.assert_close(out, literal(case), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("prefixes", "chunk", "parts"),
    [
        ((50,), 4096, [1, 6]),  # one-shot otherwise
        ((50, 33), 4096, [1, 3]),
        ((50, 0, 33), 4096, [1]),
        ((50, 20), CAP, [1, 3, 3, 1]),
    ],
)
def test_few_queries_see_their_keys_in_parts(
    prefixes: tuple[int, ...], chunk: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_plan, "LEAST_KEYS", 7)
    case = LatentBatch(starts=(9, *prefixes), lengths=(1, *[NEW] * len(prefixes)), decodes=1)
    attention = backend(case, settings(chunk_tokens=chunk, processors=6 * HEADS))
    attention.plan(case.batch)
    out = attention.forward(case.q, 0, case.pool, scale=LATENT.scale, window=None)
    torch.testing.assert_close(out, literal(case), rtol=1e-4, atol=1e-4)
    assert [gather.parts for gather in attention._gathers] == parts


def test_parts_fill_the_device_and_are_worth_their_launches() -> None:
    assert count_parts([512], [32768], 16, 132) == 2
    assert count_parts([512], [8191], 16, 132) == 1
    assert count_parts([128], [32768], 16, 132) == 8
    assert count_parts([128, 512], [32768, 4096], 16, 132) == 1
    assert count_parts([8192], [32768], 16, 132) == 1
    [low, high] = cut_keys(Chunk(2, (5, 0), (9, 4)), 2)
    assert (low, high) == (Chunk(2, (5, 0), (4, 2)), Chunk(2, (9, 2), (5, 2)))


def test_what_is_expanded_at_once_does_not_grow_with_the_prefix() -> None:
    most = []
    for prefix in (CAP, 4 * CAP, 20 * CAP):
        case = LatentBatch(starts=(prefix, prefix // 2), lengths=(NEW, NEW))
        _, attention = run(case, settings(chunk_tokens=CAP))
        most.append(attention.most_expanded)
    assert most == [max(CAP, 2 * NEW)] * 3  # the new tokens are expanded too


@pytest.mark.parametrize("budget", [1, 5, 16, 1000])
def test_chunks_hold_every_prefix_token_once(budget: int) -> None:
    starts = (0, 7, 16, 0, 33, 5)
    seen: list[tuple[int, int]] = []
    for chunk in cut_prefixes(starts, budget):
        assert 0 < chunk.num_tokens <= budget and all(chunk.counts)
        for offset, (begin, count) in enumerate(zip(chunk.begins, chunk.counts, strict=True)):
            seen += [(chunk.first + offset, begin + i) for i in range(count)]
    assert seen == [(index, i) for index, start in enumerate(starts) for i in range(start)]


def test_the_rule_that_chooses_a_form() -> None:
    lite = LatentArch(
        rank=512, nope=128, rope=64, value=128, q_rank=None, scale=1.0, interleaved=True
    )
    given = MlaSettings(chunk_tokens=32768, may_expand=True)
    assert choose_form([0, 0], [5, 9], lite, given) == "one-shot"
    assert choose_form([1000], [170], lite, given) == "absorbed"
    assert choose_form([1000], [171], lite, given) == "one-shot"
    assert choose_form([32768], [512], lite, given) == "chunked"
    assert choose_form([32768, 9], [512, 1], lite, given) == "chunked"
    off = MlaSettings(chunk_tokens=32768, may_expand=False)
    assert choose_form([1], [8192], lite, off) == "absorbed"
    assert choose_form([0], [8192], lite, off) == "one-shot"


def test_a_latent_pool_moves_slots() -> None:
    pool = LatentPool(
        num_pages=3,
        page_size=PAGE,
        num_layers=2,
        rank=LATENT.rank,
        rope=LATENT.rope,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert pool.bytes_per_token == 2 * LATENT.width * 2
    for layer in range(2):
        pool.keys(layer).copy_(torch.randn(pool.keys(layer).shape))
    before = [pool.keys(layer).clone() for layer in range(2)]
    pool.move(torch.tensor([PAGE, PAGE + 1]), torch.tensor([PAGE + 1, PAGE + 2]))
    for layer in range(2):
        assert torch.equal(pool.keys(layer)[PAGE + 1], before[layer][PAGE])
        assert torch.equal(pool.values(layer)[PAGE + 2], before[layer][PAGE + 1][:, : LATENT.rank])


def test_a_projection_taken_apart_is_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(HEADS * (LATENT.nope + LATENT.value), LATENT.rank, generator=generator)
    latents = torch.randn(3, LATENT.width, generator=generator)
    k, v = UpProjection(weight, LATENT).expand(latents)
    whole = (latents[:, : LATENT.rank] @ weight.T).view(3, HEADS, -1)
    torch.testing.assert_close(k[:, :, : LATENT.nope], whole[:, :, : LATENT.nope])
    torch.testing.assert_close(v, whole[:, :, LATENT.nope :])
    assert torch.equal(k[:, 1, LATENT.nope :], latents[:, LATENT.rank :])
    at_once = UpProjection(weight, LATENT).expand_at_once(latents)
    torch.testing.assert_close(at_once[0], k)
    torch.testing.assert_close(at_once[1], v)
    assert torch.equal(at_once[0][:, :, LATENT.nope :], k[:, :, LATENT.nope :])
