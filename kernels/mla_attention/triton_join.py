"""What programs that share a tile's keys left, made one."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def join(
    parts, ends_ptr, token, columns, splits,
    RANK: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr, LENGTH: tl.constexpr, PER_TILE: tl.constexpr,
):  # fmt: skip
    """Some columns of the weighted mean, [COLUMNS] float32. parts: of one token and head, RANK + 2
    numbers each, see `triton_kernel.attend`. They were cut by where the token's tile ends: LENGTH 0:
    ends has that of every token; else the starts of slices of LENGTH tokens, cut into tiles of
    PER_TILE."""
    if LENGTH == 0:
        end = tl.load(ends_ptr + token)
    else:
        within = token % LENGTH // PER_TILE * PER_TILE + PER_TILE
        end = tl.load(ends_ptr + token // LENGTH) + tl.minimum(within, LENGTH)
    per_split = tl.maximum(tl.cdiv(tl.cdiv(end, BLOCK), splits) * BLOCK, LEAST)
    active = tl.cdiv(end, per_split)
    s = tl.arange(0, AT_ONCE)
    m = -float("inf")
    total = 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for begin in tl.range(0, active, AT_ONCE):
        there = begin + s < active
        part = parts + (begin + s) * (RANK + 2)
        part_m = tl.load(part + RANK, mask=there, other=float("-inf"))
        part_total = tl.load(part + RANK + 1, mask=there, other=0.0)
        part_acc = tl.load(part[:, None] + columns[None, :], mask=there[:, None], other=0.0)
        larger = tl.maximum(m, tl.max(part_m, 0))
        above = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(part_m - above)
        shrink = tl.exp2(m - above)
        total = total * shrink + tl.sum(part_total * weights, 0)
        acc = acc * shrink + tl.sum(part_acc * weights[:, None], 0)
        m = larger
    return acc / tl.where(total == 0, 1.0, total)


@triton.jit
def fold(
    parts_ptr,
    out_ptr,
    ends_ptr,
    splits,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LENGTH: tl.constexpr,
    PER_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [tokens * HEADS, RANK / COLUMNS]. out: [tokens, HEADS, RANK]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    out = join(
        parts_ptr + place * splits * (RANK + 2), ends_ptr, place // HEADS, columns, splits,
        RANK, BLOCK, LEAST, COLUMNS, AT_ONCE, LENGTH, PER_TILE,
    )  # fmt: skip
    tl.store(out_ptr + place * RANK + columns, out.to(out_ptr.dtype.element_ty))
