# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Many tokens: each block of `kernels.moe.sort` times the weights of its expert."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def multiply_blocks(
    x_ptr,
    weight_ptr,
    scale_ptr,
    sorted_ptr,
    blocks_ptr,
    factors_ptr,
    out_ptr,
    num_rows,
    TOP: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,  # the weight is the tensor cores' large side
    EVEN: tl.constexpr,  # BLOCK divides K
    WIDE: tl.constexpr,  # products in float32, for the interpreter, which cannot multiply bfloat16
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """weight: [E, N, K]; scale: float32 [E, N] or None.

    GATED: x: [T, K], a token for TOP entries; out: [entries, N / 2] in sorted order; rows 2i and 2i + 1
    of the weight are gate and up of channel i. Else x: [entries, K] in sorted order, out: [entries, N]
    in theirs, times factors: float32 [entries]. grid: [N / ROWS, blocks].
    """
    steps: tl.constexpr = (K + BLOCK - 1) // BLOCK
    entry = blocks_ptr + tl.program_id(1) * 4
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(entry)
    if expert < 0:
        return
    places = tl.load(entry + 1) + tl.arange(0, TILE)
    is_row = places < tl.load(entry + 2)
    held = tl.minimum(rows, num_rows - 1)
    weight_at = weight_ptr + (expert.to(tl.int64) * num_rows + held) * K
    entries = tl.load(sorted_ptr + places, mask=is_row, other=0).to(tl.int64)
    if GATED:
        x_at = x_ptr + entries // TOP * K
    else:
        x_at = x_ptr + places.to(tl.int64) * K
    if SWAP:
        total = tl.zeros([ROWS, TILE], tl.float32)
        weight_at = weight_at[:, None] + columns[None, :]
        x_at = x_at[None, :] + columns[:, None]
    else:
        total = tl.zeros([TILE, ROWS], tl.float32)
        weight_at = weight_at[None, :] + columns[:, None]
        x_at = x_at[:, None] + columns[None, :]
    for step in tl.range(0, steps, num_stages=STAGES):
        if SWAP:
            if EVEN:
                weight = tl.load(weight_at)
                x = tl.load(x_at, mask=is_row[None, :], other=0.0)
            else:
                inside = step * BLOCK + columns < K
                weight = tl.load(weight_at, mask=inside[None, :], other=0.0)
                x = tl.load(x_at, mask=is_row[None, :] & inside[:, None], other=0.0)
            if WIDE:
                total += tl.dot(weight.to(tl.float32), x.to(tl.float32))
            else:
                total = tl.dot(weight.to(x.dtype), x, total, input_precision="ieee")
        else:
            if EVEN:
                weight = tl.load(weight_at)
                x = tl.load(x_at, mask=is_row[:, None], other=0.0)
            else:
                inside = step * BLOCK + columns < K
                weight = tl.load(weight_at, mask=inside[:, None], other=0.0)
                x = tl.load(x_at, mask=is_row[:, None] & inside[None, :], other=0.0)
            if WIDE:
                total += tl.dot(x.to(tl.float32), weight.to(tl.float32))
            else:
                total = tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")
        weight_at += BLOCK
        x_at += BLOCK
    if SWAP:
        total = tl.trans(total)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + expert * num_rows + held)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(total, [TILE, ROWS // 2, 2]))
        made = gate / (1.0 + tl.exp(-gate)) * up
        channels = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        width = num_rows // 2
        out_at = out_ptr + places.to(tl.int64)[:, None] * width + channels[None, :]
        is_held = is_row[:, None] & (channels < width)[None, :]
    else:
        made = total * tl.load(factors_ptr + entries, mask=is_row, other=0.0)[:, None]
        out_at = out_ptr + entries[:, None] * num_rows + rows[None, :]
        is_held = is_row[:, None] & (rows < num_rows)[None, :]
    tl.store(out_at, made.to(out_ptr.dtype.element_ty), mask=is_held)


@triton.jit
def add_entries(
    made_ptr,
    experts_ptr,
    residual_ptr,
    out_ptr,
    first_expert,
    num_experts,
    SIZE: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """made: [T TOP, SIZE], of which those are there whose experts are among `num_experts` from
    `first_expert` on; residual: [T, SIZE] or None; out: [T, SIZE]. In the order of the entries.
    grid: [T, SIZE / BLOCK]."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for slot in tl.static_range(TOP):
        expert = tl.load(experts_ptr + token * TOP + slot) - first_expert
        is_here = (expert >= 0) & (expert < num_experts)
        place = made_ptr + (token * TOP + slot) * SIZE + columns
        total += tl.load(place, mask=inside & is_here, other=0.0).to(tl.float32)
    places = token * SIZE + columns
    if residual_ptr is not None:
        total += tl.load(residual_ptr + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=inside)
