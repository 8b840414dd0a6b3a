# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""A few tokens: the weight is the tensor cores' large side, the tokens their small one (16 and more).

A program makes ROWS channels of TOKENS tokens. Where there are too few such tiles for the device, K is
cut into SPLITS pieces: whoever finishes a tile's last piece adds all of them in their order, so the sum
does not depend on who that was. A program that sums as many PIECES by itself comes to the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.epilogue import add_parts, finish_tile, leave_part
from kernels.linear.prefetch import prefetch_rows


@triton.jit(do_not_specialize=["M", "prefetch", "wave"])
def tile_rows(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    done_ptr,
    M,
    N,
    prefetch,  # columns of each row to ask for before the wait, and
    wave,  # how many tiles do so: about those that start at once
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECES: tl.constexpr,  # K is cut into SPLITS * PIECES; a program sums PIECES of them one by one
    EVEN: tl.constexpr,  # ROWS divides N, and SPLITS * BLOCK divides K
    WIDE: tl.constexpr,  # products in float32, for the interpreter, which cannot multiply bfloat16
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [M, K]; x_scale: [M]; weight: [N, K]; scale, bias: [N]; residual, out: [M, N], or out
    [M, N / 2] if GATED: channels 2i and 2i + 1 are then gate and up of channel i. parts: float32 [tiles,
    SPLITS, ROWS, TOKENS]; done: int32 [tiles], zero before and after. None: not wanted.
    grid: [M / TOKENS, N / ROWS, SPLITS]."""
    steps: tl.constexpr = (K + SPLITS * PIECES * BLOCK - 1) // (SPLITS * PIECES * BLOCK)  # of each
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    split = tl.program_id(2)
    first = tl.program_id(1) * ROWS
    rows = first + tl.arange(0, ROWS)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = split * PIECES * steps * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        if tile < wave:
            begin = split * PIECES * steps * BLOCK
            prefetch_rows(weight_ptr, first, N, K, begin, prefetch, ROWS)
        gdc_wait()
    weight_at = weight_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * K + columns[:, None]
    is_token = tokens < M
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for _ in tl.static_range(PIECES):
        part = tl.zeros([ROWS, TOKENS], tl.float32)
        for _ in tl.range(0, steps, num_stages=STAGES):
            if EVEN:
                weight = tl.load(weight_at, eviction_policy="evict_first")
                x = tl.load(x_at, mask=is_token[None, :], other=0.0)
            else:
                inside = columns < K
                weight = tl.load(weight_at, mask=(rows < N)[:, None] & inside[None, :], other=0.0)
                x = tl.load(x_at, mask=is_token[None, :] & inside[:, None], other=0.0)
            if WIDE:
                part += tl.dot(weight.to(tl.float32), x.to(tl.float32))
            else:
                part = tl.dot(weight.to(x.dtype), x, part, input_precision="ieee")
            weight_at += BLOCK
            x_at += BLOCK
            columns += BLOCK
        total = part if PIECES == 1 else total + part
    if SPLITS > 1:
        if not leave_part(total, parts_ptr, done_ptr, tile, split, ROWS, TOKENS, SPLITS):
            return
        total = add_parts(parts_ptr, done_ptr, tile, ROWS, TOKENS, SPLITS)
    if x_scale_ptr is not None:
        total *= tl.load(x_scale_ptr + tokens, mask=is_token, other=0.0)[None, :]
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + rows, mask=rows < N, other=0.0)[:, None]
    finish_tile(total, bias_ptr, residual_ptr, out_ptr, first, tokens, M, N, ROWS, TOKENS, GATED)
