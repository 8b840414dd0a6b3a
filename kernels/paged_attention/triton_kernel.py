"""The attention kernel on the GPU: some queries of one slice against (a part of) what they see.

A program holds a tile: up to ROWS // GROUP tokens of one slice, times the GROUP query heads that share a
KV head. It walks the slice's keys in blocks of BLOCK, through the page table, with a running softmax in
base 2.

With SPLIT several programs share a tile's keys. Each leaves its part in the workspace, and the one that
finishes last folds the parts, so there is no second launch. What a row of a tile gives depends on that
row alone, not on its place or neighbours: a block of which a row sees nothing leaves the row as it was.

Letters: R rows of a tile, N keys of a block, D the head's size, padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
TILE_FIELDS: tl.constexpr = tl.constexpr(8)  # row, token, position, count, base, end, two unused


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    rows_ptr,
    starts_ptr,
    order_ptr,
    visible_ptr,
    positions_ptr,
    parts_ptr,
    counts_ptr,
    table_stride,
    window,
    scale,
    cap,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    LISTED: tl.constexpr,
    LENGTH: tl.constexpr,
    ORDER: tl.constexpr,
    SPLIT: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    LSE: tl.constexpr,
    TWO_LOOPS: tl.constexpr,
    CARRY: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [KV_HEADS, splits, tiles]. q: [T, heads, DIM], tokens Q_STRIDE apart; out like it, dense.

    LISTED: rows_ptr is [tiles, 8] int32, see `tiles.py`; else slice i is the LENGTH tokens of row
    rows[i] from position starts[i] on, and with ORDER the slices take turns as in order [S] int32.
    scale: of the scores, times log2(e); with CAP: scale / cap, and cap * log2(e).
    LEAST: keys of a part, a multiple of BLOCK. KEPT: rows that can hold a token, a power of two.
    parts: [programs, KEPT, DIM + 2] float32 if SPLIT, counts: [tiles, KV_HEADS] int32, zero before and
    after. lse: [T, heads] float32 if LSE. EARLY: nobody writes the tables in this graph of launches.
    WIDE: products in float32, for the interpreter, which cannot multiply bfloat16. What a flag turns off
    may be None.
    """
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    head = tl.program_id(0)
    split = tl.program_id(1)
    tile = tl.program_id(2)
    splits = tl.num_programs(1)
    if LISTED:
        record = rows_ptr + tile * TILE_FIELDS
        row = tl.load(record)
        token = tl.load(record + 1)
        position = tl.load(record + 2)
        count = tl.load(record + 3)
        base = tl.load(record + 4)
        end = tl.load(record + 5)
    else:
        tiles: tl.constexpr = (LENGTH + ROWS // GROUP - 1) // (ROWS // GROUP)  # of a slice
        piece = tile // tiles
        if ORDER:
            piece = tl.load(order_ptr + piece)
        skipped = tile % tiles * (ROWS // GROUP)
        row = tl.load(rows_ptr + piece)
        position = tl.load(starts_ptr + piece) + skipped
        token = piece * LENGTH + skipped
        count = tl.minimum(LENGTH - skipped, ROWS // GROUP)
        base = -1
        end = position + count

    r = tl.arange(0, ROWS)
    d = tl.arange(0, triton.next_power_of_2(DIM))
    held = r < count * GROUP
    tokens = token + r // GROUP
    own = position + r // GROUP  # the last key a token of a chain sees
    visible = own.to(tl.int64)
    if TREE:
        if base >= 0:
            visible = tl.load(visible_ptr + tokens, mask=held, other=0)
            if WINDOW:
                own = tl.load(positions_ptr + tokens, mask=held, other=1 << 30).to(tl.int32)

    begin = 0
    if WINDOW:
        oldest = tl.min(tl.where(held, own, 1 << 30), 0) - window + 1
        if TREE:
            oldest = tl.where(base >= 0, tl.minimum(oldest, base), oldest)
        begin = tl.maximum(oldest, 0) // BLOCK * BLOCK
    per_split = tl.cdiv(tl.cdiv(end - begin, BLOCK), splits) * BLOCK
    if SPLIT:
        per_split = tl.maximum(per_split, LEAST)
    first = begin + split * per_split
    if first >= end:
        return
    last = tl.minimum(end, first + per_split)
    clear = first  # up to here every token sees everything
    if TWO_LOOPS and not WINDOW:
        clear = tl.minimum(position + 1, last)
        if TREE:
            clear = tl.where(base >= 0, tl.minimum(base, last), clear)
        clear = tl.maximum(clear // BLOCK * BLOCK, first)

    table_row = table_ptr + row.to(tl.int64) * table_stride
    k_head = k_ptr + head * DIM
    v_head = v_ptr + head * DIM
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, triton.next_power_of_2(DIM)], tl.float32)
    slots = find_slots(table_row, first, last, PAGE, BLOCK)
    if EARLY:  # all but the newest key has been there since the step before
        n = first + tl.arange(0, BLOCK)
        there = n < tl.minimum(last, position)
        k, v = read_block(k_head, v_head, slots, there, KV_HEADS, DIM, True)
        slots = find_slots(table_row, first + BLOCK, last, PAGE, BLOCK)
        newest = tl.load(table_row + position // PAGE) * PAGE + position % PAGE
        if PDL:
            gdc_wait()
        places = newest.to(tl.int64) * (KV_HEADS * DIM) + d
        is_newest = (n == position)[:, None]
        k = tl.where(is_newest, tl.load(k_head + places, mask=d < DIM, other=0.0)[None, :], k)
        v = tl.where(is_newest, tl.load(v_head + places, mask=d < DIM, other=0.0)[None, :], v)
    heads = head * GROUP + r % GROUP
    q = tl.load(
        q_ptr + tokens.to(tl.int64)[:, None] * Q_STRIDE + heads[:, None] * DIM + d[None, :],
        mask=held[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    if k_ptr.dtype.element_ty == tl.float8e4nv:  # exact in float16, and cheap to turn into it
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    if EARLY:
        acc, m, total = see(
            acc, m, total, q, k, v, n, n < last, base, own, visible, window, scale, cap,
            TREE, WINDOW, CAP, WIDE, True,
        )  # fmt: skip
        clear += BLOCK
    if TWO_LOOPS:
        for block in tl.range(first, clear, BLOCK):
            acc, m, total, slots = see_block(
                acc, m, total, slots, q, block, last, base, own, visible, window, scale, cap,
                k_head, v_head, table_row, KV_HEADS, DIM, PAGE, BLOCK, TREE, WINDOW, CAP, CARRY, WIDE,
                False,
            )  # fmt: skip
    for block in tl.range(clear, last, BLOCK):
        acc, m, total, slots = see_block(
            acc, m, total, slots, q, block, last, base, own, visible, window, scale, cap,
            k_head, v_head, table_row, KV_HEADS, DIM, PAGE, BLOCK, TREE, WINDOW, CAP, CARRY, WIDE,
            True,
        )  # fmt: skip

    active = tl.cdiv(end - begin, per_split)
    if SPLIT and active > 1:
        place = tile * KV_HEADS + head
        parts = parts_ptr + place.to(tl.int64) * splits * (KEPT * (DIM + 2))
        part = parts + split * (KEPT * (DIM + 2))
        tl.store(part + r[:, None] * DIM + d[None, :], acc, mask=held[:, None] & (d < DIM)[None, :])
        tl.store(part + KEPT * DIM + r, m, mask=held)
        tl.store(part + KEPT * DIM + KEPT + r, total, mask=held)
        tl.debug_barrier()
        done = tl.atomic_add(counts_ptr + place, 1, sem="acq_rel")
        if done == active - 1:
            tl.store(counts_ptr + place, 0)
            fold_parts(
                parts, active, token, count, head, out_ptr, lse_ptr, v_scale,
                KV_HEADS, GROUP, DIM, KEPT, LSE,
            )  # fmt: skip
    else:
        write(
            acc, m, total, r, tokens, heads, held, out_ptr, lse_ptr, v_scale,
            KV_HEADS * GROUP, DIM, LSE,
        )  # fmt: skip


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
    acc, m, total, slots, q, block, last, base, own, visible, window, scale, cap,
    k_head, v_head, table_row,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    TREE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, CARRY: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax after the keys at block .. block + BLOCK - 1, and the slots of the next."""
    n = block + tl.arange(0, BLOCK)
    there = n < last
    if not CARRY:
        slots = find_slots(table_row, block, last, PAGE, BLOCK)
    k, v = read_block(k_head, v_head, slots, there, KV_HEADS, DIM, MASKED)
    if CARRY:
        slots = find_slots(table_row, block + BLOCK, last, PAGE, BLOCK)
    acc, m, total = see(
        acc, m, total, q, k, v, n, there, base, own, visible, window, scale, cap,
        TREE, WINDOW, CAP, WIDE, MASKED,
    )  # fmt: skip
    return acc, m, total, slots


@triton.jit
def read_block(
    k_head, v_head, slots, there, KV_HEADS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr
):
    """K and V, [N, D] each; zero where nothing is `there`, if that is MASKED."""
    d = tl.arange(0, triton.next_power_of_2(DIM))
    places = slots.to(tl.int64)[:, None] * (KV_HEADS * DIM) + d[None, :]
    if MASKED:
        read = there[:, None] & (d < DIM)[None, :]
        k = tl.load(k_head + places, mask=read, other=0.0)
        v = tl.load(v_head + places, mask=read, other=0.0)
    elif DIM == triton.next_power_of_2(DIM):
        k = tl.load(k_head + places)
        v = tl.load(v_head + places)
    else:
        k = tl.load(k_head + places, mask=(d < DIM)[None, :], other=0.0)
        v = tl.load(v_head + places, mask=(d < DIM)[None, :], other=0.0)
    return k, v


@triton.jit
def see(
    acc, m, total, q, k, v, n, there, base, own, visible, window, scale, cap,
    TREE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax after the keys n, of which only those `there` count if that is MASKED.

    m: the largest score of a row so far, total and acc: the sums of weights and of weighted values."""
    k = k.to(q.dtype)
    if WIDE:
        scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)))
    else:
        scores = tl.dot(q, tl.trans(k))
    if CAP:
        scores = 1 - 2 / (tl.exp2(scores * (2 * scale)) + 1)  # tanh; scale brings it to base 2
        factor = cap
    else:
        factor = scale
    if MASKED:
        seen = n[None, :] <= own[:, None]
        if WINDOW:
            near = n[None, :] > own[:, None] - window
            seen = seen & near
        if TREE:
            offset = tl.minimum(tl.maximum(n - base, 0), 63).to(tl.int64)
            named = ((visible[:, None] >> offset[None, :]) & 1) != 0
            named = named & ((n >= base) & (n < base + 64))[None, :]
            before = (n < base)[None, :]
            if WINDOW:
                before = before & seen
            seen = (base >= 0) & (named | before) | (base < 0) & seen
        scores = tl.where(seen & there[None, :], scores, float("-inf"))
    larger = tl.maximum(m, tl.max(scores, 1) * factor)
    if MASKED:
        above = tl.where(larger == float("-inf"), 0.0, larger)
    else:
        above = larger
    p = tl.exp2(scores * factor - above[:, None])
    shrink = tl.exp2(m - above)
    total = total * shrink + tl.sum(p, 1)
    p = p.to(q.dtype)
    v = v.to(q.dtype)
    acc = acc * shrink[:, None]
    if WIDE:
        acc = tl.dot(p.to(tl.float32), v.to(tl.float32), acc)
    else:
        acc = tl.dot(p, v, acc)
    return acc, larger, total


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
