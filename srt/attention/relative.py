"""Attention whose scores depend on the distance too, with torch alone, see `srt.layers.relative`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from srt.attention.sdpa import Piece, SdpaAttention
from srt.protocols.kv_pool import KVPool


class RelativeAttention(SdpaAttention):
    """Planned as SDPA is. The bias of a piece is made whole, heads * queries * keys numbers."""

    name = "sdpa"

    def related(
        self,
        q: torch.Tensor,
        biases: torch.Tensor,
        layer: int,
        pool: KVPool,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """q [T, heads, head_dim]; biases [T, heads, extent], of distance 0 and on. Returns [T, heads,
        head_dim]."""
        keys, values = pool.keys(layer), pool.values(layer)
        outputs = [_attend(piece, q, biases, keys, values, scale, window) for piece in self.pieces]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(
    piece: Piece,
    q: torch.Tensor,
    biases: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    _, num_heads, head_dim = q.shape
    count, queries = piece.count, piece.queries
    own = slice(piece.first, piece.first + count * queries)
    q = q[own].view(count, queries, num_heads, head_dim).transpose(1, 2)
    k = keys[piece.slots].to(q.dtype).transpose(1, 2)  # [count, kv_heads, L, head_dim]
    v = values[piece.slots].to(q.dtype).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=_bias(piece, biases[own], window),
        scale=scale,
        enable_gqa=num_heads != k.shape[1],
    )
    return out.transpose(1, 2).reshape(count * queries, num_heads, head_dim)


def _bias(piece: Piece, biases: torch.Tensor, window: int | None) -> torch.Tensor:
    """[count, heads, queries, L]; minus infinity where nothing is seen."""
    assert piece.distance is not None
    _, num_heads, extent = biases.shape
    distance = piece.distance[:, None]  # [count, 1, queries, L]
    profiles = biases.view(piece.count, piece.queries, num_heads, extent).transpose(1, 2)
    shape = (*profiles.shape[:3], distance.shape[-1])
    bias = profiles.gather(-1, distance.clamp(0, extent - 1).expand(shape))
    bias = bias.masked_fill(distance >= extent, 0.0)
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return bias.masked_fill_(unseen, -torch.inf)
