"""Causal attention over pages, one slice after the other, in float32, rounded once.

A token at position p sees positions max(0, p - window + 1) .. p of its row; in a slice with a base, what
lies before the base in that way, and the keys that its bits name.
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
    bases: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // k_plane.shape[1]
    first = 0
    slices = zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    for index, (row, start, length) in enumerate(slices):
        end = start + length
        seen = torch.arange(end)
        slots = page_table[row].long()[seen // page_size] * page_size + seen % page_size
        k = k_plane[slots].float().repeat_interleave(group, dim=1)  # [end, heads, d]
        v = v_plane[slots].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,shd->hts", q[first : first + length].float(), k) * scale
        tokens = slice(first, first + length)
        base = -1 if bases is None else int(bases[index])
        if base < 0:
            shown = see_before(seen, torch.arange(start, end), window)
        else:
            shown = see_named(seen, base, window, tokens, visible, positions)
        probabilities = scores.masked_fill(~shown, float("-inf")).softmax(dim=-1)
        out[first : first + length] = torch.einsum("hts,shd->thd", probabilities, v).to(q.dtype)
        first += length
    return out


def see_before(seen: torch.Tensor, own: torch.Tensor, window: int | None) -> torch.Tensor:
    """seen: [L] key positions; own: [N] those of the tokens. Returns [N, L] bool."""
    shown = seen <= own[:, None]
    return shown if window is None else shown & (seen > own[:, None] - window)


def see_named(
    seen: torch.Tensor,
    base: int,
    window: int | None,
    tokens: slice,
    visible: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> torch.Tensor:
    """The same for the tokens of a slice with a base."""
    assert visible is not None, "bases without visible"
    bits = visible[tokens, None] >> (seen - base).clamp(0, 63) & 1
    named = (seen >= base) & (seen < base + 64) & bits.bool()
    before = seen < base
    if window is not None:
        assert positions is not None, "bases and a window without positions"
        before = before & see_before(seen, positions[tokens], window)
    return named | before
