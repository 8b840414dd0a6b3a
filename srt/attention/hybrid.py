"""Two backends side by side: decode slices go to one, the rest to the other."""

from __future__ import annotations

from dataclasses import replace

import torch

from srt.protocols.attention import AttentionBackend, AttentionBatch
from srt.protocols.kv_pool import KVPool


class HybridAttention:
    """A batch of one kind never touches the other backend."""

    def __init__(self, *, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.name = f"{prefill.name}+{decode.name}"
        self.prefill = prefill
        self.decode = decode
        self._num_decode = 0
        self._has_prefill = False

    def plan(self, batch: AttentionBatch) -> None:
        count = batch.num_decode
        self._num_decode = count
        self._has_prefill = len(batch.rows_host) > count
        if not self._has_prefill:
            self.decode.plan(batch)
        elif count == 0:
            self.prefill.plan(batch)
        else:
            self.decode.plan(_cut(batch, slice(0, count), slice(0, count), count))
            self.prefill.plan(_cut(batch, slice(count, None), slice(count, None), 0))

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, *, scale: float, window: int | None
    ) -> torch.Tensor:
        count = self._num_decode
        if not self._has_prefill:
            return self.decode.forward(q, layer, pool, scale=scale, window=window)
        if count == 0:
            return self.prefill.forward(q, layer, pool, scale=scale, window=window)
        decoded = self.decode.forward(q[:count], layer, pool, scale=scale, window=window)
        rest = self.prefill.forward(q[count:], layer, pool, scale=scale, window=window)
        return torch.cat((decoded, rest))


def _cut(batch: AttentionBatch, pieces: slice, tokens: slice, num_decode: int) -> AttentionBatch:
    """The same tables, fewer slices. Decode slices have one token each, so both cuts are alike."""
    return replace(
        batch,
        num_decode=num_decode,
        rows=batch.rows[pieces],
        starts=batch.starts[pieces],
        lengths=batch.lengths[pieces],
        rows_host=batch.rows_host[pieces],
        starts_host=batch.starts_host[pieces],
        lengths_host=batch.lengths_host[pieces],
        slots=batch.slots[tokens],
        positions=batch.positions[tokens],
        bases=None if batch.bases is None else batch.bases[pieces],
        bases_host=batch.bases_host[pieces],
        visible=None if batch.visible is None else batch.visible[tokens],
    )
