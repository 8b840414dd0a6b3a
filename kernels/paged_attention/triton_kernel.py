"""The attention kernel on the GPU: some queries of one slice against (a part of) what they see.

A program holds a tile: up to ROWS // GROUP tokens of one slice, times the GROUP query heads that share a
KV head. It walks the slice's keys in blocks of BLOCK, through the page table, with a running softmax in
base 2.

With SPLIT several programs share a tile's keys. Each leaves its part in the workspace, and the one that
finishes last folds the parts, so there is no second launch. What a row of a tile gives depends on that
row alone, not on its place or neighbours: a block of which a row sees nothing leaves the row as it was.

A cache of 8 bits may come as int16, two neighbours of a head in each (PAIRED): pairs move through shared
memory as any 16 bits do and are taken apart in registers, the even numbers of a head and the odd ones.
Single bytes would have to be read one by one there.

Letters: R rows of a tile, N keys of a block, D the head's size, padded to a power of two, or half of
that where keys come in pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.paged_attention.triton_fold import fold_parts, write

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
    k, v: [slots, KV_HEADS, DIM], or int16 [slots, KV_HEADS, DIM / 2], see `unpair`.

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

    PAIRED: tl.constexpr = k_ptr.dtype.element_ty == tl.int16
    WIDTH: tl.constexpr = DIM // 2 if PAIRED else DIM  # elements of a stored head
    PADDED: tl.constexpr = triton.next_power_of_2(WIDTH)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    held = r < count * GROUP
    tokens = token + r // GROUP
    own = position + r // GROUP  # the last key a token of a chain sees
    visible = own.to(tl.int64)
    if TREE:
        if base >= 0:
            visible = tl.load(visible_ptr + tokens, mask=held, other=0.0)
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
    k_head = k_ptr + head * WIDTH
    v_head = v_ptr + head * WIDTH
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    odd = acc  # of the odd numbers of a head, if PAIRED
    slots = find_slots(table_row, first, last, PAGE, BLOCK)
    if EARLY:  # all but the newest key has been there since the step before
        n = first + tl.arange(0, BLOCK)
        there = n < tl.minimum(last, position)
        k, v = read_block(k_head, v_head, slots, there, KV_HEADS, WIDTH, True)
        slots = find_slots(table_row, first + BLOCK, last, PAGE, BLOCK)
        newest = tl.load(table_row + position // PAGE) * PAGE + position % PAGE
        if PDL:
            gdc_wait()
        places = newest.to(tl.int64) * (KV_HEADS * WIDTH) + d
        is_newest = (n == position)[:, None]
        k = tl.where(is_newest, tl.load(k_head + places, mask=d < WIDTH, other=0.0)[None, :], k)
        v = tl.where(is_newest, tl.load(v_head + places, mask=d < WIDTH, other=0.0)[None, :], v)
    heads = head * GROUP + r % GROUP
    q_at = q_ptr + tokens.to(tl.int64)[:, None] * Q_STRIDE + heads[:, None] * DIM
    q_mask = held[:, None] & (d < WIDTH)[None, :]
    if PAIRED:
        q = load_narrow(q_at + 2 * d[None, :], q_mask)
        q_odd = load_narrow(q_at + 2 * d[None, :] + 1, q_mask)
    else:
        if k_ptr.dtype.element_ty == tl.float8e4nv:
            q = load_narrow(q_at + d[None, :], q_mask)
        else:
            q = tl.load(q_at + d[None, :], mask=q_mask, other=0.0)
        q_odd = q
    if EARLY:
        acc, odd, m, total = see(
            acc, odd, m, total, q, q_odd, k, v, n, n < last, base, own, visible, window, scale, cap,
            PAIRED, TREE, WINDOW, CAP, WIDE, True,
        )  # fmt: skip
        clear += BLOCK
    if TWO_LOOPS:
        for block in tl.range(first, clear, BLOCK):
            acc, odd, m, total, slots = see_block(
                acc, odd, m, total, slots, q, q_odd, block, last, base, own, visible, window, scale, cap,
                k_head, v_head, table_row, KV_HEADS, WIDTH, PAGE, BLOCK, PAIRED, TREE, WINDOW, CAP,
                CARRY, WIDE, False,
            )  # fmt: skip
    for block in tl.range(clear, last, BLOCK):
        acc, odd, m, total, slots = see_block(
            acc, odd, m, total, slots, q, q_odd, block, last, base, own, visible, window, scale, cap,
            k_head, v_head, table_row, KV_HEADS, WIDTH, PAGE, BLOCK, PAIRED, TREE, WINDOW, CAP, CARRY,
            WIDE, True,
        )  # fmt: skip

    if PAIRED:
        acc = tl.interleave(acc, odd)
        d = tl.arange(0, 2 * PADDED)
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
    acc, odd, m, total, slots, q, q_odd, block, last, base, own, visible, window, scale, cap,
    k_head, v_head, table_row,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    PAIRED: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    CARRY: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax after the keys at block .. block + BLOCK - 1, and the slots of the next."""
    n = block + tl.arange(0, BLOCK)
    there = n < last
    if not CARRY:
        slots = find_slots(table_row, block, last, PAGE, BLOCK)
    k, v = read_block(k_head, v_head, slots, there, KV_HEADS, WIDTH, MASKED)
    if CARRY:
        slots = find_slots(table_row, block + BLOCK, last, PAGE, BLOCK)
    acc, odd, m, total = see(
        acc, odd, m, total, q, q_odd, k, v, n, there, base, own, visible, window, scale, cap,
        PAIRED, TREE, WINDOW, CAP, WIDE, MASKED,
    )  # fmt: skip
    return acc, odd, m, total, slots


@triton.jit
def read_block(
    k_head, v_head, slots, there, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """K and V as they are stored, [N, D] each; zero where nothing is `there`, if that is MASKED."""
    d = tl.arange(0, triton.next_power_of_2(WIDTH))
    places = slots.to(tl.int64)[:, None] * (KV_HEADS * WIDTH) + d[None, :]
    if MASKED:
        read = there[:, None] & (d < WIDTH)[None, :]
        k = tl.load(k_head + places, mask=read, other=0.0)
        v = tl.load(v_head + places, mask=read, other=0.0)
    elif WIDTH == triton.next_power_of_2(WIDTH):
        k = tl.load(k_head + places)
        v = tl.load(v_head + places)
    else:
        k = tl.load(k_head + places, mask=(d < WIDTH)[None, :], other=0.0)
        v = tl.load(v_head + places, mask=(d < WIDTH)[None, :], other=0.0)
    return k, v


@triton.jit
def load_narrow(q_at, mask):
    """q for a cache of 8 bits, whose numbers are exact in float16."""
    q = tl.load(q_at, mask=mask, other=0.0).to(tl.float32)
    return tl.clamp(q, -65504.0, 65504.0).to(tl.float16)


@triton.jit
def unpair(pairs, WIDE: tl.constexpr):
    """The low and the high bytes of int16, e4m3 each, in float16."""
    if WIDE:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # two pairs in a register: both low bytes together, both high bytes together
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def see(
    acc, odd, m, total, q, q_odd, k, v, n, there, base, own, visible, window, scale, cap,
    PAIRED: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax after the keys n, of which only those `there` count if that is MASKED.

    m: the largest score of a row so far, total, acc and odd: the sums of weights and of weighted values.
    """
    if PAIRED:
        k, k_odd = unpair(k, WIDE)
        v, v_odd = unpair(v, WIDE)
        scores = multiply(q_odd, tl.trans(k_odd), multiply(q, tl.trans(k), None, WIDE), WIDE)
    else:
        k, v = k.to(q.dtype), v.to(q.dtype)
        scores = multiply(q, tl.trans(k), None, WIDE)
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
    acc = multiply(p, v, acc * shrink[:, None], WIDE)
    if PAIRED:
        odd = multiply(p, v_odd, odd * shrink[:, None], WIDE)
    return acc, odd, larger, total


@triton.jit
def multiply(a, b, total, WIDE: tl.constexpr):
    """a b, added to `total` if there is one."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total)
