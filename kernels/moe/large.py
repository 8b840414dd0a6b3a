# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Very many tokens: like `grouped.multiply_blocks`, with weights, and x where its rows lie together,
fetched by the copy engine. Hopper and newer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_tiles(
    x_ptr,
    x_tiles,
    weight_tiles,
    x_scale_ptr,
    scale_ptr,
    sorted_ptr,
    blocks_ptr,
    factors_ptr,
    out_ptr,
    num_rows,
    TOP: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,  # products in float32, for the interpreter, which cannot multiply bfloat16
    GATED: tl.constexpr,
):
    """weight_tiles: of [E N, K], ROWS x BLOCK each; BLOCK divides K. x_ptr: [T, K] if GATED, else None,
    and x_tiles: of [entries, K], TILE x BLOCK each. With weights in fp8 x is so too: x_scale: float32, a
    number for each of its rows; scale: float32 [E, N]; else None. The rest as in `multiply_blocks`, and
    the grid."""
    entry = blocks_ptr + tl.program_id(1) * 4
    expert = tl.load(entry)
    if expert < 0:
        return
    begin, places, is_row, entries = find_entries(sorted_ptr, entry, TILE)
    columns = tl.arange(0, BLOCK)
    row = expert * num_rows + tl.program_id(0) * ROWS
    if GATED:
        x_at = x_ptr + (entries // TOP).to(tl.int64)[:, None] * K + columns[None, :]
    total = tl.zeros([TILE, ROWS], tl.float32)
    for k in tl.range(0, K, BLOCK, num_stages=STAGES):
        if GATED:
            x = tl.load(x_at + k)
        else:
            x = x_tiles.load([begin, k])
        weight = weight_tiles.load([row, k])
        total = add_product(total, x, weight, WIDE)
    finish_tile(
        total,
        tl.program_id(0),
        expert,
        entries,
        places,
        is_row,
        x_scale_ptr,
        scale_ptr,
        factors_ptr,
        out_ptr,
        num_rows,
        TOP,
        TILE,
        ROWS,
        GATED,
    )


@triton.jit
def stream_tiles(
    x_ptr,
    x_tiles,
    weight_tiles,
    x_scale_ptr,
    scale_ptr,
    sorted_ptr,
    blocks_ptr,
    factors_ptr,
    out_ptr,
    num_blocks,
    num_rows,
    TOP: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    GATED: tl.constexpr,
):
    """`multiply_tiles` by as many programs as there are multiprocessors: each fetches for its next tile
    while it writes one."""
    used = 0
    for at in range(0, num_blocks, 128):
        block = at + tl.arange(0, 128)
        owner = tl.load(blocks_ptr + block * 4, mask=block < num_blocks, other=-1)
        used += tl.sum((owner >= 0).to(tl.int32), 0)
    row_tiles = (num_rows + ROWS - 1) // ROWS
    columns = tl.arange(0, BLOCK)
    for tile in tl.range(
        tl.program_id(0), used * row_tiles, tl.num_programs(0), num_stages=STAGES, flatten=True
    ):
        row_tile = tile % row_tiles
        entry = blocks_ptr + tile // row_tiles * 4
        expert = tl.load(entry)
        begin, places, is_row, entries = find_entries(sorted_ptr, entry, TILE)
        row = expert * num_rows + row_tile * ROWS
        total = tl.zeros([TILE, ROWS], tl.float32)
        for k in tl.range(0, K, BLOCK):
            if GATED:
                token = (entries // TOP).to(tl.int64)
                x = tl.load(x_ptr + token[:, None] * K + (k + columns)[None, :])
            else:
                x = x_tiles.load([begin, k])
            weight = weight_tiles.load([row, k])
            total = add_product(total, x, weight, WIDE)
        finish_tile(
            total,
            row_tile,
            expert,
            entries,
            places,
            is_row,
            x_scale_ptr,
            scale_ptr,
            factors_ptr,
            out_ptr,
            num_rows,
            TOP,
            TILE,
            ROWS,
            GATED,
        )


@triton.jit
def find_entries(sorted_ptr, entry, TILE: tl.constexpr):
    """Of the block that stands at `entry`: its first place, and of [TILE] places from there on whether
    they are its, and what entries lie there."""
    begin = tl.load(entry + 1)
    places = begin + tl.arange(0, TILE)
    is_row = places < tl.load(entry + 2)
    return begin, places, is_row, tl.load(sorted_ptr + places, mask=is_row, other=0)


@triton.jit
def add_product(total, x, weight, WIDE: tl.constexpr):
    if WIDE:
        total += tl.dot(x.to(tl.float32), weight.to(tl.float32).T)
    else:
        total = tl.dot(x, weight.T, total)
    return total


@triton.jit
def finish_tile(
    total,
    row_tile,
    expert,
    entries,
    places,
    is_row,
    x_scale_ptr,
    scale_ptr,
    factors_ptr,
    out_ptr,
    num_rows,
    TOP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
):
    """Writes what is made of a tile's sums: total, [TILE, ROWS]."""
    if scale_ptr is not None:
        held = row_tile * ROWS + tl.arange(0, ROWS)
        scale_at = scale_ptr + expert * num_rows + held
        total *= tl.load(scale_at, mask=held < num_rows, other=0.0)[None, :]
        x_row = entries // TOP if GATED else places
        total *= tl.load(x_scale_ptr + x_row, mask=is_row, other=0.0)[:, None]
    if GATED:
        gate, up = tl.split(tl.reshape(total, [TILE, ROWS // 2, 2]))
        made = gate / (1.0 + tl.exp(-gate)) * up
        channels = row_tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
        width = num_rows // 2
        out_at = out_ptr + places.to(tl.int64)[:, None] * width + channels[None, :]
        is_held = is_row[:, None] & (channels < width)[None, :]
        tl.store(out_at, made.to(out_ptr.dtype.element_ty), mask=is_held)
    else:
        total *= tl.load(factors_ptr + entries, mask=is_row, other=0.0)[:, None]
        made = total.to(out_ptr.dtype.element_ty)
        # In four parts: the places of all of it would take more registers than there are.
        left, right = split_columns(made)
        first, second = split_columns(left)
        third, fourth = split_columns(right)
        rows = row_tile * ROWS + tl.arange(0, ROWS // 4)
        out_at = out_ptr + entries.to(tl.int64) * num_rows
        store_rows(out_at, rows, num_rows, is_row, first)
        store_rows(out_at, rows + ROWS // 4, num_rows, is_row, second)
        store_rows(out_at, rows + ROWS // 2, num_rows, is_row, third)
        store_rows(out_at, rows + ROWS // 4 * 3, num_rows, is_row, fourth)


@triton.jit
def split_columns(x):
    """[M, N] -> its left and its right half."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def store_rows(row_at, columns, num_columns, is_row, x):
    """row_at: [M] pointers; x: [M, N]."""
    mask = is_row[:, None] & (columns < num_columns)[None, :]
    tl.store(row_at[:, None] + columns[None, :], x, mask=mask)
