"""Short causal convolutions over the tokens of a row, one for each channel, whose past lies in pages.

    y(p) = x(p) + sum over j of w[taps - 1 - j] * x(p - j),   j = 0 .. taps - 1,   x = 0 before the row

The tokens before a step's own are read from the pool: page `g` keeps the inputs of its last tokens, the
one at place o of the page in entry g * depth + o % depth. So a later token takes the place of an older
one that no continuation can ask for: rows grow at their ends, and shared prefixes are whole pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from srt.protocols.attention import AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PastPlan:
    """The step's geometry for all convolutions. Inputs are looked up in one row of zeros, the `past`
    entries [P] of the pool, then the step's T tokens: `sources` [taps - 1, T] are the 1st, 2nd, .. token
    before each. `kept` [W] of the step's tokens go to the entries `entries` [W]."""

    past: torch.Tensor
    sources: torch.Tensor
    kept: torch.Tensor
    entries: torch.Tensor


def depth_of(taps: int, page_size: int) -> int:
    """Inputs that a page keeps."""
    return min(taps - 1, page_size)


def plan_past(batch: AttentionBatch, taps: int) -> PastPlan:
    device, page = batch.page_table.device, batch.page_size
    depth, back = depth_of(taps, page), taps - 1
    starts, lengths = batch.starts.long(), batch.lengths.long()
    num_slices, num_tokens = len(starts), len(batch.positions)
    firsts = lengths.cumsum(0) - lengths
    owner = torch.repeat_interleave(torch.arange(num_slices, device=device), lengths)
    offsets = torch.arange(num_tokens, device=device) - firsts[owner]

    before = starts[:, None] - 1 - torch.arange(back, device=device)  # [S, taps - 1]
    pages = batch.page_table[batch.rows.long()[:, None], before.clamp(min=0) // page].long()
    past = pages * depth + before.clamp(min=0) % page % depth

    sources = []
    for j in range(1, taps):
        of_past = owner * back + (j - offsets - 1)
        is_there = starts[owner] + offsets >= j
        earlier = torch.where(is_there, 1 + of_past, 0)
        inside = torch.arange(num_tokens, device=device) + 1 + num_slices * back - j
        sources.append(torch.where(offsets >= j, inside, earlier))

    positions = starts[owner] + offsets
    follower = positions + depth  # who would take the entry
    is_last = follower >= (starts + lengths)[owner]
    kept = (is_last | (follower // page != positions // page)).nonzero()[:, 0]
    mine = batch.page_table[batch.rows.long()[owner[kept]], positions[kept] // page].long()
    return PastPlan(
        past=past.flatten(),
        sources=torch.stack(sources),
        kept=kept,
        entries=mine * depth + positions[kept] % page % depth,
    )


def convolve(
    x: torch.Tensor, weight: torch.Tensor, plan: PastPlan, memory: torch.Tensor
) -> torch.Tensor:
    """x [T, C]; weight [taps, C] float32, the last of them the token's own; memory [entries, C] float32,
    read, then written. Computed in float32, given in x's dtype."""
    wide = x.float()
    known = torch.cat([wide.new_zeros(1, wide.shape[1]), memory[plan.past], wide])
    out = wide * weight[-1]
    for index, source in enumerate(plan.sources):
        out += known[source] * weight[-2 - index]
    memory[plan.entries] = wide[plan.kept]
    return (out + wide).to(x.dtype)
