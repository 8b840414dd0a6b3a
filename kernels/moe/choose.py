# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""The router's choice."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def choose_experts(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    scale,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    FORCED: tl.constexpr,
    # powers of two, not less than groups, experts of a group, and TOP + SHARED
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """logits: float32 [T, EXPERTS]; bias: float32 [EXPERTS] or None; weights: float32 [T, TOP + SHARED];
    experts: int32, alike. grid: [T]."""
    size: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0)
    groups = tl.arange(0, WIDTH)
    members = tl.arange(0, DEPTH)
    experts = groups[:, None] * size + members[None, :]
    is_there = (groups < GROUPS)[:, None] & (members < size)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    places = token.to(tl.int64) * EXPERTS + experts
    logits = tl.load(logits_ptr + places, mask=is_there, other=float("-inf"))
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=is_there, other=0.0)
    choice = tl.where(is_there, choice, float("-inf"))
    if TOP_GROUPS < GROUPS:
        worth = tl.max(choice, 1)
        if bias_ptr is not None:
            is_first = members[None, :] == tl.argmax(choice, 1)[:, None]
            worth += tl.max(tl.where(is_first, float("-inf"), choice), 1)
        is_in = groups < 0
        for _ in tl.static_range(TOP_GROUPS):
            is_best = groups == tl.argmax(worth, 0)
            is_in = is_in | is_best
            worth = tl.where(is_best, float("-inf"), worth)
        choice = tl.where(is_in[:, None], choice, float("-inf"))
    # Nothing is reshaped to one axis: Triton 3.6 may permute what only a reduction reads then, but not
    # the indices that `return_indices` gives (seen where TOP is 1).
    index = groups[:, None] * DEPTH + members[None, :]
    slots = tl.arange(0, SLOTS)
    weights = tl.zeros([SLOTS], tl.float32)
    chosen = tl.zeros([SLOTS], tl.int32)
    for slot in tl.static_range(TOP):
        score = tl.max(tl.max(choice, 1), 0)
        first = tl.min(tl.min(tl.where(choice == score, index, WIDTH * DEPTH - 1), 1), 0)
        is_best = index == first
        if bias_ptr is not None:
            score = tl.sum(tl.sum(tl.where(is_best, scores, 0.0), 1), 0)
        weights = tl.where(slots == slot, score, weights)
        chosen = tl.where(slots == slot, first // DEPTH * size + first % DEPTH, chosen)
        choice = tl.where(is_best, float("-inf"), choice)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    if FORCED:
        chosen = (token * TOP + slots) % EXPERTS
    weights = tl.where(slots < TOP, weights * scale, 1.0)
    chosen = tl.where(slots < TOP, chosen, EXPERTS + slots - TOP)
    at = token.to(tl.int64) * (TOP + SHARED) + slots
    tl.store(weights_ptr + at, weights, mask=slots < TOP + SHARED)
    tl.store(experts_ptr + at, chosen, mask=slots < TOP + SHARED)
