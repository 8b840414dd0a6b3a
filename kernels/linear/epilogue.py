# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""What becomes of a tile's float32 sums [ROWS, TOKENS], whatever the weight was stored in."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def leave_part(
    total,
    parts_ptr,
    done_ptr,
    tile,
    split,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Stores this piece of the sum. Returns whether it was the tile's last; then they can be added."""
    size: tl.constexpr = ROWS * TOKENS
    within = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    tl.store(parts_ptr + (tile.to(tl.int64) * SPLITS + split) * size + within, total)
    tl.debug_barrier()  # every thread's part is out before one of them counts it
    return tl.atomic_add(done_ptr + tile, 1, sem="acq_rel") == SPLITS - 1


@triton.jit
def add_parts(
    parts_ptr, done_ptr, tile, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr
):
    """All pieces of a tile, in their order."""
    size: tl.constexpr = ROWS * TOKENS
    within = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    tl.store(done_ptr + tile, 0)
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for piece in tl.static_range(SPLITS):
        at = (tile.to(tl.int64) * SPLITS + piece) * size
        total += tl.load(parts_ptr + at + within, cache_modifier=".cg")
    return total


@triton.jit
def finish_tile(
    total, bias_ptr, residual_ptr, out_ptr, first, tokens, M, N, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Bias, gate and residual, and the store. first: the tile's first row; tokens: [TOKENS]."""
    rows = first + tl.arange(0, ROWS)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    width = N
    if GATED:
        pairs = tl.permute(tl.reshape(total, [ROWS // 2, 2, TOKENS]), [0, 2, 1])
        gate, up = tl.split(pairs)
        total = gate / (1.0 + tl.exp(-gate)) * up
        rows = first // 2 + tl.arange(0, ROWS // 2)
        width = N // 2
    places = tokens.to(tl.int64)[None, :] * width + rows[:, None]
    kept = (tokens < M)[None, :] & (rows < width)[:, None]
    if residual_ptr is not None:
        total += tl.load(residual_ptr + places, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=kept)
