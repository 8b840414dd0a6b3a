"""The sdpa backend against the reference kernel, and a hybrid of two against one."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import select
from srt.attention import sdpa
from srt.attention.hybrid import HybridAttention
from srt.attention.native import NativeAttention
from srt.attention.sdpa import SdpaAttention
from srt.cache.pools import PagedKVPool
from srt.protocols.attention import AttentionBackend, AttentionBatch

HEADS, KV_HEADS, DIM = 6, 2, 16
DECODES = [(0, 5), (2, 37), (1, 0)]  # row, position
PREFILLS = [(3, 0, 20), (5, 17, 9), (4, 40, 1)]  # row, start, length


def make_batch(
    page_size: int, decodes: list[tuple[int, int]], prefills: list[tuple[int, int, int]]
) -> tuple[AttentionBatch, PagedKVPool, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pages_per_row = -(-64 // page_size)
    pool = PagedKVPool(
        num_pages=1 + 6 * pages_per_row,
        page_size=page_size,
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for plane in (pool.keys(0), pool.values(0)):
        plane[page_size:] = torch.randn(plane[page_size:].shape, generator=generator)
    order = 1 + torch.randperm(6 * pages_per_row, generator=generator)
    rows = [row for row, _ in decodes] + [row for row, _, _ in prefills]
    starts = [at for _, at in decodes] + [start for _, start, _ in prefills]
    lengths = [1] * len(decodes) + [length for _, _, length in prefills]
    total = sum(lengths)
    batch = AttentionBatch(
        num_decode=len(decodes),
        page_size=page_size,
        page_table=order.view(6, pages_per_row).to(torch.int32),
        rows=torch.tensor(rows, dtype=torch.int32),
        starts=torch.tensor(starts, dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        rows_host=rows,
        starts_host=starts,
        lengths_host=lengths,
        slots=torch.zeros(total, dtype=torch.int64),
        positions=torch.zeros(total, dtype=torch.int64),
    )
    return batch, pool, torch.randn(total, HEADS, DIM, generator=generator)


def run(
    backend: AttentionBackend,
    made: tuple[AttentionBatch, PagedKVPool, torch.Tensor],
    window: int | None,
) -> torch.Tensor:
    batch, pool, q = made
    backend.plan(batch)
    return backend.forward(q, 0, pool, scale=0.3, window=window)


def reference() -> NativeAttention:
    return NativeAttention(select("reference").paged_attention)


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("decodes", "prefills"), [(DECODES, PREFILLS), (DECODES, []), ([], PREFILLS)]
)
def test_every_backend_equals_the_reference(
    decodes: list[tuple[int, int]],
    prefills: list[tuple[int, int, int]],
    page_size: int,
    window: int | None,
) -> None:
    made = make_batch(page_size, decodes, prefills)
    expected = run(reference(), made, window)
    hybrids = (
        HybridAttention(prefill=SdpaAttention(), decode=reference()),
        HybridAttention(prefill=reference(), decode=SdpaAttention()),
    )
    for backend in (SdpaAttention(), *hybrids):
        torch.testing.assert_close(run(backend, made, window), expected, rtol=1e-5, atol=1e-5)


def test_a_hybrid_gives_each_kind_to_its_own() -> None:
    class Recorder(SdpaAttention):
        def __init__(self) -> None:
            super().__init__()
            self.lengths: list[list[int]] = []

        def plan(self, batch: AttentionBatch) -> None:
            self.lengths.append(batch.lengths_host)
            super().plan(batch)

    prefill, decode = Recorder(), Recorder()
    hybrid = HybridAttention(prefill=prefill, decode=decode)
    for decodes, prefills in ((DECODES, PREFILLS), (DECODES, []), ([], PREFILLS)):
        run(hybrid, make_batch(16, decodes, prefills), None)
    assert decode.lengths == [[1, 1, 1], [1, 1, 1]]
    assert prefill.lengths == [[20, 9, 1], [20, 9, 1]]


def test_uneven_decodes_are_cut_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "GROUP_TOKENS", 60)
    made = make_batch(16, [(0, 5), (1, 9), (2, 50), (3, 3), (4, 60)], [])
    expected = run(reference(), made, None)
    torch.testing.assert_close(run(SdpaAttention(), made, None), expected, rtol=1e-5, atol=1e-5)
