"""Paged attention out of torch calls: one SDPA for all slices of length 1, one for each longer slice."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention as attend


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
    out = torch.empty(q.shape, dtype=q.dtype)
    counts, begins = lengths.tolist(), starts.tolist()
    singles = [i for i, length in enumerate(counts) if length == 1]
    offsets = [0]
    for length in counts:
        offsets.append(offsets[-1] + length)

    if singles:
        tokens = torch.tensor([offsets[i] for i in singles])
        own = starts[singles].long()[:, None]
        longest = max(begins[i] for i in singles) + 1
        seen = torch.arange(longest)
        visible = seen <= own
        if window is not None:
            visible &= seen > own - window
        # Positions past a row's end read page_table padding; they are masked, so any page will do.
        slots = _slots(page_table[rows[singles].long()], seen, page_size) * visible
        k = k_plane[slots].transpose(1, 2)  # [S, kv_heads, longest, d]
        v = v_plane[slots].transpose(1, 2)
        groups = q[tokens].view(
            len(singles), k.shape[1], -1, q.shape[2]
        )  # the heads of a group act as q positions
        mask = visible[:, None, None, :]
        out[tokens] = attend(groups, k, v, attn_mask=mask, scale=scale).flatten(1, 2)

    for i, length in enumerate(counts):
        if length <= 1:
            continue
        start, end, first = begins[i], begins[i] + length, offsets[i]
        seen = torch.arange(end)
        slots = _slots(page_table[int(rows[i])][None], seen, page_size)
        k, v = k_plane[slots].transpose(1, 2), v_plane[slots].transpose(1, 2)
        queries = q[first : first + length].transpose(0, 1)[None]
        if start == 0 and (window is None or window >= end):
            result = attend(queries, k, v, is_causal=True, scale=scale, enable_gqa=True)
        else:
            own = torch.arange(start, end)[:, None]
            visible = seen <= own
            if window is not None:
                visible &= seen > own - window
            result = attend(queries, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
        out[first : first + length] = result[0].transpose(0, 1)
    return out


def _slots(pages: torch.Tensor, seen: torch.Tensor, page_size: int) -> torch.Tensor:
    """pages: [S, max_pages]; seen: [n] positions. Returns [S, n]."""
    return pages[:, seen // page_size].long() * page_size + seen % page_size
