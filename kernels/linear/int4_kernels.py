# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""The kernels that read int4 weights, see `quantized.Int4Weight`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.epilogue import add_parts, finish_tile, leave_part


@triton.jit
def steps_above(nibbles, zero, dtype: tl.constexpr, EXACT: tl.constexpr):
    """nibbles: [R, H] uint8 of 0..15; zero: [R]. nibble - zero in `dtype`, exactly. EXACT: by the bits
    of bfloat16, in which 0x4300 + n is 128 + n; converting integers takes the device much longer."""
    if EXACT:
        bits = (nibbles.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return bits - (zero.to(tl.float32) + 128.0).to(tl.bfloat16)[:, None]
    return (nibbles.to(tl.float32) - zero.to(tl.float32)[:, None]).to(dtype)


@triton.jit(do_not_specialize=["M"])
def int4_rows(
    x_ptr,
    values_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    done_ptr,
    M,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,
    WIDE: tl.constexpr,  # products in float32, for the interpreter, which cannot multiply bfloat16
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [M, K]; values: [N, K / 2] as `quantized.pack_nibbles` has them; scales, zeros: [N, K / GROUP];
    the rest as in `tiles.tile_rows`. A step is a unit of 2 HALF columns, whose sums are scaled as they
    come. grid: [M / TOKENS, N / ROWS, SPLITS]."""
    units: tl.constexpr = K // (2 * HALF)
    steps: tl.constexpr = (units + SPLITS * PIECES - 1) // (SPLITS * PIECES)
    groups: tl.constexpr = K // GROUP
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    split = tl.program_id(2)
    first = tl.program_id(1) * ROWS
    rows = first + tl.arange(0, ROWS)
    held = rows < N
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < M
    within = tl.arange(0, HALF)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values_at = values_ptr + rows.to(tl.int64)[:, None] * (K // 2) + within[None, :]
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * K + within[:, None]
    group_at = rows * groups
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for piece in tl.static_range(PIECES):
        part = tl.zeros([ROWS, TOKENS], tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            unit = (split * PIECES + piece) * steps + step
            inside = unit < units
            low_group = unit * 2 * HALF // GROUP
            high_group = (unit * 2 * HALF + HALF) // GROUP
            values = tl.load(values_at + unit * HALF, mask=held[:, None] & inside, other=0)
            low_x = tl.load(x_at + unit * 2 * HALF, mask=is_token[None, :] & inside, other=0.0)
            high_x = tl.load(
                x_at + (unit * 2 * HALF + HALF), mask=is_token[None, :] & inside, other=0.0
            )
            scale = tl.load(scales_ptr + group_at + low_group, mask=held & inside, other=0.0)
            zero = tl.load(zeros_ptr + group_at + low_group, mask=held & inside, other=0)
            exact: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not WIDE
            kind: tl.constexpr = tl.float32 if WIDE else x_ptr.dtype.element_ty
            low = steps_above(values & 15, zero, kind, exact)
            if GROUP >= 2 * HALF:
                high = steps_above(values >> 4, zero, kind, exact)
                sums = tl.dot(low, low_x.to(kind))
                sums = tl.dot(high, high_x.to(kind), sums)
                part += sums * scale.to(tl.float32)[:, None]
            else:
                part += tl.dot(low, low_x.to(kind)) * scale.to(tl.float32)[:, None]
                scale = tl.load(scales_ptr + group_at + high_group, mask=held & inside, other=0.0)
                zero = tl.load(zeros_ptr + group_at + high_group, mask=held & inside, other=0)
                high = steps_above(values >> 4, zero, kind, exact)
                part += tl.dot(high, high_x.to(kind)) * scale.to(tl.float32)[:, None]
        total = part if PIECES == 1 else total + part
    if SPLITS > 1:
        if not leave_part(total, parts_ptr, done_ptr, tile, split, ROWS, TOKENS, SPLITS):
            return
        total = add_parts(parts_ptr, done_ptr, tile, ROWS, TOKENS, SPLITS)
    finish_tile(total, bias_ptr, residual_ptr, out_ptr, first, tokens, M, N, ROWS, TOKENS, GATED)


@triton.jit
def expand_rows(
    values_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    first,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """out: [rows, K], the rows from `first` on in the type of `out`. grid: [rows, K / (2 HALF)]."""
    row = first + tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    within = tl.arange(0, HALF)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(values_ptr + row * (K // 2) + unit * HALF + within)
    out = out_ptr + tl.program_id(0).to(tl.int64) * K + unit * 2 * HALF + within
    for half in tl.static_range(2):
        group = row * (K // GROUP) + (unit * 2 * HALF + half * HALF) // GROUP
        steps = ((values >> (4 * half)) & 15).to(tl.float32) - tl.load(zeros_ptr + group).to(
            tl.float32
        )
        wide = steps * tl.load(scales_ptr + group).to(tl.float32)
        tl.store(out + half * HALF, wide.to(out_ptr.dtype.element_ty))
