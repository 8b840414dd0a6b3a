"""Causal attention over pages, one slice after the other, in float32, rounded once.

A token at position p sees positions max(0, p - window + 1) .. p of its row.
"""

from __future__ import annotations

import torch


def paged_attention(
    q: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // k_plane.shape[1]
    first = 0
    for row, start, length in zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        end = start + length
        seen = torch.arange(end)
        slots = page_table[row].long()[seen // page_size] * page_size + seen % page_size
        k = k_plane[slots].float().repeat_interleave(group, dim=1)  # [end, heads, d]
        v = v_plane[slots].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,shd->hts", q[first : first + length].float(), k) * scale
        own = torch.arange(start, end)[:, None]
        hidden = seen[None, :] > own
        if window is not None:
            hidden |= seen[None, :] <= own - window
        probabilities = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[first : first + length] = torch.einsum("hts,shd->thd", probabilities, v).to(q.dtype)
        first += length
    return out
