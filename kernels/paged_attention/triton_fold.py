"""What becomes of the sums that the attention kernel leaves: a tile's own, or those of all its parts."""

from __future__ import annotations

import triton
import triton.language as tl

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def write(
    acc, m, total, r, tokens, heads, held, out_ptr, lse_ptr, v_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, triton.next_power_of_2(DIM))
    total = tl.where(held, total, 1.0)
    out = acc * (v_scale / total)[:, None]
    places = tokens.to(tl.int64) * HEADS + heads
    tl.store(
        out_ptr + places[:, None] * DIM + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=held[:, None] & (d < DIM)[None, :],
    )
    if LSE:
        tl.store(lse_ptr + places, (m + tl.log2(total)) * LN_2, mask=held)


@triton.jit
def fold_parts(
    parts, active, token, count, head, out_ptr, lse_ptr, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, KEPT: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """Reads past the first-level cache: other programs wrote the parts while this one ran."""
    D: tl.constexpr = triton.next_power_of_2(DIM)
    SIZE: tl.constexpr = KEPT * (DIM + 2)
    AT_ONCE: tl.constexpr = min(max(8192 // (KEPT * D), 1), 16)  # loads under way together
    r = tl.arange(0, KEPT)
    d = tl.arange(0, D)
    held = r < count * GROUP
    m = tl.full([KEPT], float("-inf"), tl.float32)
    total = tl.zeros([KEPT], tl.float32)
    acc = tl.zeros([KEPT, D], tl.float32)
    for begin in tl.range(0, active, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = held & (begin + i < active)
            part = parts + (begin + i) * SIZE
            sums = part + KEPT * DIM + r
            part_m = tl.load(sums, mask=there, other=float("-inf"), cache_modifier=".cg")
            part_total = tl.load(sums + KEPT, mask=there, other=0.0, cache_modifier=".cg")
            part_acc = tl.load(
                part + r[:, None] * DIM + d[None, :],
                mask=there[:, None] & (d < DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            larger = tl.maximum(m, part_m)
            above = tl.where(larger == float("-inf"), 0.0, larger)
            weight = tl.exp2(part_m - above)
            shrink = tl.exp2(m - above)
            total = total * shrink + part_total * weight
            acc = acc * shrink[:, None] + part_acc * weight[:, None]
            m = larger
    tokens = token + r // GROUP
    heads = head * GROUP + r % GROUP
    write(
        acc, m, total, r, tokens, heads, held, out_ptr, lse_ptr, v_scale,
        KV_HEADS * GROUP, DIM, LSE,
    )  # fmt: skip
