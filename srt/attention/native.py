"""Attention in one compiled call per layer, decode and prefill slices together."""

from __future__ import annotations

import torch

from kernels.paged_attention import PagedAttention
from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool


class NativeAttention:
    """Needs no plan of its own: the kernel walks the page table."""

    name = "native"
    wants_new = False

    def __init__(self, paged_attention: PagedAttention) -> None:
        self._paged_attention = paged_attention
        self._batch: AttentionBatch | None = None

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def capture(self, batch: AttentionBatch) -> None:
        self.plan(batch)

    def replay(self, batch: AttentionBatch) -> None:
        """A step that is played on a CPU is computed again."""
        self._batch = batch

    def forward(
        self,
        q: torch.Tensor,
        layer: int,
        pool: KVPool,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        assert cap is None, "the capability table says so"
        batch = self._batch
        assert batch is not None, "forward before plan"
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
            batch.bases,
            batch.visible,
            batch.positions,
        )
