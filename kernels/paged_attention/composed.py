"""Paged attention out of torch calls: one SDPA for all slices of length 1, one for each longer slice."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from kernels.paged_attention.reference import see_before, see_named


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
    out = torch.empty(q.shape, dtype=q.dtype)
    counts, begins = lengths.tolist(), starts.tolist()
    named = [-1] * len(counts) if bases is None else bases.tolist()
    singles = [i for i, length in enumerate(counts) if length == 1 and named[i] < 0]
    offsets = [0]
    for length in counts:
        offsets.append(offsets[-1] + length)

    if singles:
        places = torch.tensor([offsets[i] for i in singles])
        own = starts[singles].long()[:, None]
        longest = max(begins[i] for i in singles) + 1
        seen = torch.arange(longest)
        shown = seen <= own
        if window is not None:
            shown &= seen > own - window
        # Past a row's end its last key stands in, masked: any other slot might hold a NaN.
        pages = page_table[rows[singles].long()].long()
        at = torch.minimum(seen, own)
        slots = pages.gather(1, at // page_size) * page_size + at % page_size
        k = k_plane[slots].transpose(1, 2)  # [S, kv_heads, longest, d]
        v = v_plane[slots].transpose(1, 2)
        # The heads of a group act as positions of q.
        groups = q[places].view(len(singles), k.shape[1], -1, q.shape[2])
        mask = shown[:, None, None, :]
        out[places] = attend(groups, k, v, attn_mask=mask, scale=scale).flatten(1, 2)

    for i, length in enumerate(counts):
        if length == 0 or (length == 1 and named[i] < 0):
            continue
        start, end, first = begins[i], begins[i] + length, offsets[i]
        seen = torch.arange(end)
        slots = page_table[int(rows[i])].long()[seen // page_size] * page_size + seen % page_size
        k, v = (plane[slots].transpose(0, 1)[None] for plane in (k_plane, v_plane))
        queries = q[first : first + length].transpose(0, 1)[None]
        if start == 0 and named[i] < 0 and (window is None or window >= end):
            result = attend(queries, k, v, is_causal=True, scale=scale, enable_gqa=True)
        else:
            if named[i] < 0:
                shown = see_before(seen, torch.arange(start, end), window)
            else:
                tokens = slice(first, first + length)
                shown = see_named(seen, named[i], window, tokens, visible, positions)
            result = attend(queries, k, v, attn_mask=shown, scale=scale, enable_gqa=True)
        out[first : first + length] = result[0].transpose(0, 1)
    return out
