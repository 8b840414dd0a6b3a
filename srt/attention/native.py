"""Attention in one compiled call per layer, decode and prefill slices together."""

from __future__ import annotations

import torch

from kernels.paged_attention import PagedAttention
from srt.attention.sdpa import SdpaAttention
from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool


class NativeAttention:
    """Needs no plan of its own: the kernel walks the page table. Steps with windows go to torch."""

    name = "native"

    def __init__(self, paged_attention: PagedAttention) -> None:
        self._paged_attention = paged_attention
        self._batch: AttentionBatch | None = None
        self._windowed = SdpaAttention()

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        if batch.visible is not None:
            self._windowed.plan(batch)

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, *, scale: float, window: int | None
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "forward before plan"
        if batch.visible is not None:
            return self._windowed.forward(q, layer, pool, scale=scale, window=window)
        return self._paged_attention(
            q,
            pool.keys(layer),
            pool.values(layer),
            batch.page_table,
            batch.rows,
            batch.starts,
            batch.lengths,
            batch.page_size,
            scale,
            window,
        )
