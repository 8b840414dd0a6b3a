"""Attention with torch alone, on any device and dtype: gather the pages, then the fused SDPA op.

Decode slices run together, padded to the longest of their group: one gather and one call per layer,
no Python per request. Prefill slices run one by one, each already large. The indices are made once
per step, for every window the model has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool

GROUP_TOKENS = 65536  # padded KV tokens gathered at once; bounds memory when lengths differ much


@dataclass(slots=True)
class Piece:
    """Slices computed in one call: n of them, `queries` tokens each, over KV gathered at `slots`."""

    first: int  # first token in the step
    count: int
    queries: int
    slots: torch.Tensor  # [count, L] int64; padding reads slot 0, which stays zero
    distance: torch.Tensor | None  # [count, queries, L]: query position - key position; pad < 0
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """[count, 1, queries, L] bool, True where seen; None: everything is."""
        if window not in self.masks:
            assert self.distance is not None
            seen = self.distance >= 0
            if window is not None:
                seen &= self.distance < window
            self.masks[window] = None if bool(seen.all()) else seen[:, None]
        return self.masks[window]


class SdpaAttention:
    name = "sdpa"
    wants_new = False

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def plan(self, batch: AttentionBatch) -> None:
        self.pieces = [
            *(_plan_decode(batch, first, last) for first, last in _groups(batch)),
            *_plan_prefill(batch),
        ]

    def capture(self, batch: AttentionBatch) -> None:
        """A CUDA graph cannot hold it: its shapes follow the lengths. What is simply run again can."""
        self.plan(batch)

    def replay(self, batch: AttentionBatch) -> None:
        self.plan(batch)

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
        keys, values = pool.keys(layer), pool.values(layer)
        scale *= pool.k_scale(layer)
        outputs = [_attend(piece, q, keys, values, scale, window) for piece in self.pieces]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        v_scale = pool.v_scale(layer)
        return out if v_scale == 1 else out * v_scale


def _attend(
    piece: Piece,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    _, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    count, queries = piece.count, piece.queries
    q = q[piece.first : piece.first + count * queries]
    k = keys[piece.slots].to(q.dtype).transpose(1, 2)  # [count, kv_heads, L, head_dim]
    v = values[piece.slots].to(q.dtype).transpose(1, 2)
    mask = piece.mask(window)
    if queries == 1:  # the query heads of one KV head stand in as its queries: no KV is repeated
        q = q.view(count, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.reshape(count, num_heads, -1)
    q = q.view(count, queries, num_heads, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=num_heads != num_kv_heads
    )
    return out.transpose(1, 2).reshape(count * queries, num_heads, -1)


def _groups(batch: AttentionBatch) -> list[tuple[int, int]]:
    """Neighbouring decode slices, cut so that count * longest stays below GROUP_TOKENS."""
    groups: list[tuple[int, int]] = []
    first, longest = 0, 0
    for index in range(batch.num_decode):
        longest = max(longest, batch.starts_host[index] + 1)
        if index > first and (index - first + 1) * longest > GROUP_TOKENS:
            groups.append((first, index))
            first, longest = index, batch.starts_host[index] + 1
    if batch.num_decode > first:
        groups.append((first, batch.num_decode))
    return groups


def _plan_decode(batch: AttentionBatch, first: int, last: int) -> Piece:
    longest = max(batch.starts_host[first:last]) + 1
    keys = torch.arange(longest, device=batch.page_table.device)
    distance = batch.starts[first:last, None].long() - keys  # [n, L]
    pages = batch.page_table[batch.rows[first:last].long()][:, keys // batch.page_size]
    slots = pages.long() * batch.page_size + keys % batch.page_size
    slots = slots.where(distance >= 0, 0)
    return Piece(first, last - first, 1, slots, distance[:, None])


def _plan_prefill(batch: AttentionBatch) -> list[Piece]:
    pieces = []
    token = batch.num_decode
    for index in range(batch.num_decode, len(batch.rows_host)):
        start, length = batch.starts_host[index], batch.lengths_host[index]
        keys = torch.arange(start + length, device=batch.page_table.device)
        pages = batch.page_table[batch.rows_host[index]][keys // batch.page_size]
        slots = pages.long() * batch.page_size + keys % batch.page_size
        distance = keys[start:, None] - keys
        if batch.bases_host and batch.bases_host[index] >= 0:
            distance = _look(batch, slice(token, token + length), keys, batch.bases_host[index])
        pieces.append(Piece(token, 1, length, slots[None], distance[None]))
        token += length
    return pieces


def _look(batch: AttentionBatch, tokens: slice, keys: torch.Tensor, base: int) -> torch.Tensor:
    """[queries, L] distances of a slice with a window: what is visible in it counts as near, for it is
    never further than the window is long; what is not, as behind."""
    assert batch.visible is not None
    bits = batch.visible[tokens, None] >> (keys - base).clamp(min=0) & 1
    return torch.where(keys < base, batch.positions[tokens, None] - keys, bits - 1)
