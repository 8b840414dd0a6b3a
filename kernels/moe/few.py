# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""A few tokens: only the chosen experts' weights are read, as fast as they can be. Products stay in
registers, [ROWS, BLOCK] float32, and are summed once at the end."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def gate_few(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    experts_ptr,
    out_ptr,
    num_rows,
    first_expert,
    num_experts,
    eps,
    TOP: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,  # ROWS divides num_rows, and BLOCK divides K
    PDL: tl.constexpr,
):
    """x: [T, K]; norm: [K], of an RMS norm before, or None; weight: [E, num_rows, K], rows 2i and 2i + 1
    are gate and up of channel i; scale: float32 [E, num_rows] or None; experts: int32 [T, TOP]; out:
    [T TOP, num_rows / 2]. grid: [num_rows / ROWS, T TOP]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    entry = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(experts_ptr + entry) - first_expert
    if (expert < 0) | (expert >= num_experts):
        return
    x_at = x_ptr + (entry // TOP).to(tl.int64) * K + columns
    weight_at = (
        weight_ptr + ((expert.to(tl.int64) * num_rows + rows) * K)[:, None] + columns[None, :]
    )
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for k in tl.range(0, K, BLOCK, num_stages=STAGES):
        if EVEN:
            weight = tl.load(weight_at + k)
            x = tl.load(x_at + k).to(tl.float32)
        else:
            inside = k + columns < K
            weight = tl.load(weight_at + k, mask=(rows < num_rows)[:, None] & inside, other=0.0)
            x = tl.load(x_at + k, mask=inside, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + k + columns, mask=k + columns < K, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
    made = tl.sum(total, 1)
    if norm_ptr is not None:
        made *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if scale_ptr is not None:
        made *= tl.load(scale_ptr + expert * num_rows + rows, mask=rows < num_rows, other=0.0)
    gate, up = tl.split(tl.reshape(made, [ROWS // 2, 2]))
    made = gate / (1.0 + tl.exp(-gate)) * up
    channels = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    width = num_rows // 2
    out_at = out_ptr + entry.to(tl.int64) * width + channels
    tl.store(out_at, made.to(out_ptr.dtype.element_ty), mask=channels < width)


@triton.jit
def down_few(
    x_ptr,
    weight_ptr,
    scale_ptr,
    experts_ptr,
    factors_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    first_expert,
    num_experts,
    TOP: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [T TOP, K]; weight: [E, num_rows, K]; scale: float32 [E, num_rows] or None; experts, factors:
    [T, TOP] int32 and float32; residual: [T, num_rows] or None; out: [T, num_rows]. The experts of a
    token are summed in their order. grid: [num_rows / ROWS, T]."""
    pieces: tl.constexpr = (K + BLOCK - 1) // BLOCK
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    token = tl.program_id(1)
    is_row = rows < num_rows
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in tl.range(0, TOP * pieces, num_stages=STAGES):
        entry = token * TOP + step // pieces
        k = step % pieces * BLOCK
        expert = tl.load(experts_ptr + entry) - first_expert
        is_here = (expert >= 0) & (expert < num_experts)
        expert = tl.where(is_here, expert, 0)
        row_at = expert * num_rows + rows
        weight_at = weight_ptr + row_at.to(tl.int64)[:, None] * K + k + columns[None, :]
        x_at = x_ptr + entry.to(tl.int64) * K + k + columns
        if EVEN:
            weight = tl.load(weight_at)
            x = tl.load(x_at, mask=is_here, other=0.0)
        else:
            inside = k + columns < K
            weight = tl.load(weight_at, mask=is_row[:, None] & inside, other=0.0)
            x = tl.load(x_at, mask=inside & is_here, other=0.0)
        x = x.to(tl.float32) * tl.load(factors_ptr + entry)
        product = weight.to(tl.float32) * x[None, :]
        if scale_ptr is not None:
            product *= tl.load(scale_ptr + row_at, mask=is_row, other=0.0)[:, None]
        total += product
    made = tl.sum(total, 1)
    places = token.to(tl.int64) * num_rows + rows
    if residual_ptr is not None:
        made += tl.load(residual_ptr + places, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, made.to(out_ptr.dtype.element_ty), mask=is_row)
