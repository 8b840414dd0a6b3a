# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, assignment"
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
        gdc_wait()
        gdc_launch_dependents()  # not earlier: `down_few` counts on the experts' being there
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
def find_slot(experts_ptr, factors_ptr, entry, end, first_expert, num_experts):
    """Expert, -1 if it is elsewhere or `entry` is not below `end`, and factor."""
    is_there = entry < end
    expert = tl.load(experts_ptr + entry, mask=is_there, other=-1, cache_modifier=".cg")
    factor = tl.load(factors_ptr + entry, mask=is_there, other=0.0, cache_modifier=".cg")
    expert -= first_expert
    is_here = is_there & (expert >= 0) & (expert < num_experts)
    return tl.where(is_here, expert, -1), factor


@triton.jit
def load_weights(
    weight_ptr,
    expert,
    first_row,
    num_rows,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS x K of the expert, in pieces [ROWS, BLOCK]; nothing of -1."""
    rows = first_row + tl.arange(0, ROWS)
    at = weight_ptr + (expert.to(tl.int64) * num_rows + rows)[:, None] * K
    is_row = ((rows < num_rows) & (expert >= 0))[:, None]
    pieces = ()
    for begin in tl.static_range(0, K, BLOCK):
        columns = begin + tl.max_contiguous(tl.arange(0, BLOCK), 8)[None, :]
        pieces = pieces + (tl.load(at + columns, mask=is_row & (columns < K), other=0.0),)
    return pieces


@triton.jit
def load_inputs(x_ptr, entry, expert, K: tl.constexpr, BLOCK: tl.constexpr):
    """What multiplies them, in pieces [1, BLOCK]."""
    at = x_ptr + entry * K  # of few tokens: 32 bits are enough
    pieces = ()
    for begin in tl.static_range(0, K, BLOCK):
        columns = begin + tl.arange(0, BLOCK)[None, :]
        pieces = pieces + (tl.load(at + columns, mask=(columns < K) & (expert >= 0), other=0.0),)
    return pieces


@triton.jit
def add_pieces(
    total, weights, inputs, expert, factor, scale_ptr, first_row, num_rows,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pieces: tl.constexpr = (K + BLOCK - 1) // BLOCK
    if scale_ptr is None:
        for piece in tl.static_range(pieces):
            total += weights[piece].to(tl.float32) * (inputs[piece].to(tl.float32) * factor)
    else:
        rows = first_row + tl.arange(0, ROWS)
        is_row = (rows < num_rows) & (expert >= 0)
        scale = tl.load(scale_ptr + expert * num_rows + rows, mask=is_row, other=0.0) * factor
        own = tl.zeros([ROWS, BLOCK], tl.float32)
        for piece in tl.static_range(pieces):
            own += weights[piece].to(tl.float32) * inputs[piece].to(tl.float32)
        total += own * scale[:, None]
    return total


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
    top,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [T top, K]; weight: [E, num_rows, K]; scale: float32 [E, num_rows] or None; experts, factors:
    [T, top] int32 and float32; residual: [T, num_rows] or None; out: [T, num_rows]. The experts of a
    token are summed in their order. grid: [num_rows / ROWS, T].

    The weights of two experts are on their way at any time, into registers: where BLOCK is 8 columns for
    each thread, weights and x lie in them alike, and no thread waits for another before the sum at the
    end. Experts and factors were written before `gate_few`, which lets this kernel in when it has seen
    them: so they, and the first weights, are read before the wait, past the first-level cache, which may
    hold what was there before.
    """
    first_row = tl.program_id(0) * ROWS
    token = tl.program_id(1)
    entry = token * top
    end = entry + top
    if PDL:
        gdc_launch_dependents()
    expert0, factor0 = find_slot(experts_ptr, factors_ptr, entry, end, first_expert, num_experts)
    expert1, factor1 = find_slot(
        experts_ptr, factors_ptr, entry + 1, end, first_expert, num_experts
    )
    next0, later0 = find_slot(experts_ptr, factors_ptr, entry + 2, end, first_expert, num_experts)
    next1, later1 = find_slot(experts_ptr, factors_ptr, entry + 3, end, first_expert, num_experts)
    weights0 = load_weights(weight_ptr, expert0, first_row, num_rows, K, ROWS, BLOCK)
    weights1 = load_weights(weight_ptr, expert1, first_row, num_rows, K, ROWS, BLOCK)
    if PDL:
        gdc_wait()
    inputs0 = load_inputs(x_ptr, entry, expert0, K, BLOCK)
    inputs1 = load_inputs(x_ptr, entry + 1, expert1, K, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for at in tl.range(entry + 2, end + 2, 2, num_stages=1):
        total = add_pieces(
            total,
            weights0,
            inputs0,
            expert0,
            factor0,
            scale_ptr,
            first_row,
            num_rows,
            K,
            ROWS,
            BLOCK,
        )
        weights0 = load_weights(weight_ptr, next0, first_row, num_rows, K, ROWS, BLOCK)
        inputs0 = load_inputs(x_ptr, at, next0, K, BLOCK)
        total = add_pieces(
            total,
            weights1,
            inputs1,
            expert1,
            factor1,
            scale_ptr,
            first_row,
            num_rows,
            K,
            ROWS,
            BLOCK,
        )
        weights1 = load_weights(weight_ptr, next1, first_row, num_rows, K, ROWS, BLOCK)
        inputs1 = load_inputs(x_ptr, at + 1, next1, K, BLOCK)
        expert0, factor0, expert1, factor1 = next0, later0, next1, later1
        next0, later0 = find_slot(experts_ptr, factors_ptr, at + 2, end, first_expert, num_experts)
        next1, later1 = find_slot(experts_ptr, factors_ptr, at + 3, end, first_expert, num_experts)
    made = tl.sum(total, 1)
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < num_rows
    places = token.to(tl.int64) * num_rows + rows
    if residual_ptr is not None:
        made += tl.load(residual_ptr + places, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, made.to(out_ptr.dtype.element_ty), mask=is_row)
