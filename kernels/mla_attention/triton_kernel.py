"""Absorbed MLA on the GPU: queries of a slice against (a part of) the latents they see.

A program holds a tile: some tokens of one slice times GROUP of the heads, ROWS in all. All heads read
the same latents, which are keys and values at once, so a block of them is loaded once and multiplied
twice. With SPLIT several programs share a tile's keys, and a second launch, `fold`, joins what they
leave.

Letters: R rows of a tile, N keys of a block, D the rank, E the rotated key's size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TILE_FIELDS: tl.constexpr = tl.constexpr(8)  # row, token, position, count, four unused


@triton.jit
def attend(
    q_latent_ptr,
    q_ptr,
    plane_ptr,
    out_ptr,
    table_ptr,
    rows_ptr,
    starts_ptr,
    parts_ptr,
    table_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    Q_LATENT_STRIDE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    Q_HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    LENGTH: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of heads, splits, tiles]. LENGTH 0: rows_ptr is [tiles, 8] int32, see `tiles.py` of
    `paged_attention`; else every slice has LENGTH tokens, slice i those of row rows[i] from position
    starts[i] on, and they are cut here.

    scale: of the scores, times log2(e). Q_HEAD: channels of a head of q, the last ROPE of which count.
    parts: [tokens, HEADS, splits, RANK + 2] float32 if SPLIT. WIDE: products in float32, for the
    interpreter."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    split = tl.program_id(1)
    tile = tl.program_id(2)
    splits = tl.num_programs(1)
    if LENGTH == 0:
        record = rows_ptr + tile * TILE_FIELDS
        row = tl.load(record)
        token = tl.load(record + 1)
        position = tl.load(record + 2)
        count = tl.load(record + 3)
    else:
        per_tile: tl.constexpr = ROWS // GROUP
        pieces: tl.constexpr = (LENGTH + per_tile - 1) // per_tile
        skipped = tile % pieces * per_tile
        row = tl.load(rows_ptr + tile // pieces)
        position = tl.load(starts_ptr + tile // pieces) + skipped
        token = tile // pieces * LENGTH + skipped
        count = tl.minimum(LENGTH - skipped, per_tile)
    end = position + count
    per_split = end
    if SPLIT:
        per_split = tl.maximum(tl.cdiv(tl.cdiv(end, BLOCK), splits) * BLOCK, LEAST)
    first = split * per_split
    if first >= end:
        return
    last = tl.minimum(end, first + per_split)

    r = tl.arange(0, ROWS)
    d = tl.arange(0, RANK)
    e = tl.arange(0, ROPE)
    heads = tl.program_id(0) * GROUP + r % GROUP
    held = (r < count * GROUP) & (heads < HEADS)
    tokens = (token + r // GROUP).to(tl.int64)
    own = position + r // GROUP
    q_latent = tl.load(
        q_latent_ptr + tokens[:, None] * Q_LATENT_STRIDE + heads[:, None] * RANK + d[None, :],
        mask=held[:, None],
        other=0.0,
    )
    q_at = q_ptr + tokens[:, None] * Q_STRIDE + heads[:, None] * Q_HEAD + (Q_HEAD - ROPE)
    q_turned = tl.load(q_at + e[None, :], mask=held[:, None], other=0.0)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK], tl.float32)
    table_row = table_ptr + row.to(tl.int64) * table_stride
    clear = tl.maximum(tl.minimum(position + 1, last) // BLOCK * BLOCK, first)
    slots = find_slots(table_row, first, last, PAGE, BLOCK)
    for block in tl.range(first, clear, BLOCK):  # every row sees all of these
        acc, m, total, slots = see_block(
            acc, m, total, slots, q_latent, q_turned, block, last, own, scale, plane_ptr, table_row,
            RANK, ROPE, PAGE, BLOCK, WIDE, False,
        )  # fmt: skip
    for block in tl.range(clear, last, BLOCK):
        acc, m, total, slots = see_block(
            acc, m, total, slots, q_latent, q_turned, block, last, own, scale, plane_ptr, table_row,
            RANK, ROPE, PAGE, BLOCK, WIDE, True,
        )  # fmt: skip
    places = tokens * HEADS + heads
    if SPLIT:
        part = parts_ptr + (places * splits + split)[:, None] * (RANK + 2)
        tl.store(part + d[None, :], acc, mask=held[:, None])
        sums = parts_ptr + (places * splits + split) * (RANK + 2) + RANK
        tl.store(sums, m, mask=held)
        tl.store(sums + 1, total, mask=held)
    else:
        total = tl.where(held, total, 1.0)
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + places[:, None] * RANK + d[None, :], out, mask=held[:, None])


@triton.jit
def find_slots(table_row, block, last, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Slots of the keys at block .. block + BLOCK - 1; those from `last` on get that of the last."""
    n = tl.minimum(block + tl.arange(0, BLOCK), last - 1)
    if PAGE % BLOCK == 0:  # a block lies in one page
        slots = tl.load(table_row + tl.minimum(block, last - 1) // PAGE) * PAGE + n % PAGE
    else:
        slots = tl.load(table_row + n // PAGE) * PAGE + n % PAGE
    return slots


@triton.jit
def see_block(
    acc, m, total, slots, q_latent, q_turned, block, last, own, scale, plane_ptr, table_row,
    RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax, in base 2, after the keys at block .. block + BLOCK - 1, and the slots of the
    next. m: the largest score of a row so far; total, acc: the sums of weights and weighted latents."""
    n = block + tl.arange(0, BLOCK)
    d = tl.arange(0, RANK)
    e = tl.arange(0, ROPE)
    places = plane_ptr + slots.to(tl.int64)[:, None] * (RANK + ROPE)
    if MASKED:
        there = n < last
        latents = tl.load(places + d[None, :], mask=there[:, None], other=0.0)
        turned = tl.load(places + RANK + e[None, :], mask=there[:, None], other=0.0)
    else:
        latents = tl.load(places + d[None, :])
        turned = tl.load(places + RANK + e[None, :])
    slots = find_slots(table_row, block + BLOCK, last, PAGE, BLOCK)
    latents = latents.to(q_latent.dtype)
    turned = turned.to(q_latent.dtype)
    if WIDE:
        scores = tl.dot(q_latent.to(tl.float32), tl.trans(latents.to(tl.float32)))
        scores = tl.dot(q_turned.to(tl.float32), tl.trans(turned.to(tl.float32)), scores)
    else:
        scores = tl.dot(q_turned, tl.trans(turned))
        scores = tl.dot(q_latent, tl.trans(latents), scores)
    scores = scores * scale
    if MASKED:
        seen = (n[None, :] <= own[:, None]) & (n < last)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(m, tl.max(scores, 1))
    if MASKED:
        above = tl.where(larger == float("-inf"), 0.0, larger)
    else:
        above = larger
    p = tl.exp2(scores - above[:, None])
    shrink = tl.exp2(m - above)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    p = p.to(q_latent.dtype)
    if WIDE:
        acc = tl.dot(p.to(tl.float32), latents.to(tl.float32), acc)
    else:
        acc = tl.dot(p, latents, acc)
    return acc, larger, total, slots
