"""Sampling on the GPU in two kernels, whatever the rows ask for.

scan   a block per (line, tile of the vocabulary) reads the logits once: the tile's largest; of a row
       that is drawn the winner of the race between the tile's blocks of 64 ids; of a row with a rule
       that cuts the blocks' largest logits and the tile's mass
pick   a block per line puts the tiles together; a rule that cuts finds its least weight here, by
       `kernels.sample.triton_kernel`; then the race inside the block of 64 ids that won

Sums have a fixed order that depends on the vocabulary's size alone, so a line's token does not depend on
what else is in the batch. Weights are relative to their tile's largest logit in `scan`, to the line's in
`pick`: the law is the same, the last bit of a weight may not be that of the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import launch_options
from kernels.sample.table import COLUMNS, Drawn
from kernels.sample.triton_kernel import draw_kept, exponential, position_key, weights_of

BLOCK = 64
TILE = 4096


@triton.jit
def line_state(
    rows_ptr, offsets_ptr, table_ptr, line, COLUMNS: tl.constexpr, OFFSETS: tl.constexpr
):
    """A line's row of the table: noise key, top_k, top_p, min_p, 1 / temperature."""
    state = table_ptr + tl.load(rows_ptr + line).to(tl.int64) * COLUMNS
    position = tl.load(state)
    if OFFSETS:
        position += tl.load(offsets_ptr + line)
    key = position_key(tl.load(state + 1), position)
    top_k = tl.load(state + 2)
    top_p = tl.load(state + 3).to(tl.float64, bitcast=True)
    min_p = tl.load(state + 4).to(tl.float64, bitcast=True)
    inverse = tl.load(state + 5).to(tl.float64, bitcast=True)
    return key, top_k, top_p, min_p, inverse


@triton.jit
def scan(
    logits_ptr,
    rows_ptr,
    offsets_ptr,
    table_ptr,
    scores_ptr,
    tile_peaks_ptr,
    tile_tokens_ptr,
    tile_blocks_ptr,
    block_peaks_ptr,
    stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [tiles, lines]. Per line and tile: scores [N, tiles] float64, peaks float32, tokens and
    blocks int32; block_peaks [N, tiles * TILE / 64] float32, only of rows with a rule that cuts."""
    BLOCKS: tl.constexpr = TILE // 64
    tile, line = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.num_programs(0)
    ids = tile * TILE + tl.arange(0, TILE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key, top_k, top_p, min_p, inverse = line_state(
        rows_ptr, offsets_ptr, table_ptr, line, COLUMNS, OFFSETS
    )
    start = logits_ptr + line.to(tl.int64) * stride
    read = tl.load(start + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    is_nan = read != read
    values = tl.where(is_nan, float("-inf"), read)
    peak = tl.max(values, axis=0)
    token = tl.min(tl.where(values == peak, ids, VOCAB), axis=0)
    out = line * num_tiles + tile
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    tl.store(tile_peaks_ptr + out, tl.where(has_nan, float("nan"), peak))
    tl.store(tile_tokens_ptr + out, token)
    if inverse > 0:
        zero = tl.where((peak > float("-inf")) & (peak < float("inf")), peak, 0.0)
        weights = tl.reshape(weights_of(values, zero, inverse), (BLOCKS, 64))
        masses = tl.sum(weights, axis=1).to(tl.float64)
        blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            tl.store(
                block_peaks_ptr + line * num_tiles * BLOCKS + blocks,
                tl.max(tl.reshape(values, (BLOCKS, 64)), axis=1),
            )
            tl.store(scores_ptr + out, tl.sum(masses, axis=0))
        else:
            scores = masses / exponential(key, blocks.to(tl.int64) + (1 << 40))
            best = tl.max(scores, axis=0)
            tl.store(scores_ptr + out, best)
            tl.store(
                tile_blocks_ptr + out, tl.min(tl.where(scores == best, blocks, 1 << 30), axis=0)
            )


@triton.jit
def pick(
    logits_ptr,
    rows_ptr,
    offsets_ptr,
    table_ptr,
    scores_ptr,
    tile_peaks_ptr,
    tile_tokens_ptr,
    tile_blocks_ptr,
    block_peaks_ptr,
    candidates_ptr,
    tokens_ptr,
    peaks_ptr,
    floors_ptr,
    stride,
    VOCAB: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [lines]. TILES and BLOCKS are the next powers of two of what `scan` left per line."""
    line = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    held = tiles < NUM_TILES
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key, top_k, top_p, min_p, inverse = line_state(
        rows_ptr, offsets_ptr, table_ptr, line, COLUMNS, OFFSETS
    )
    first = line * NUM_TILES
    read = tl.load(tile_peaks_ptr + first + tiles, mask=held, other=float("-inf"))
    is_nan = read != read
    tile_peaks = tl.where(is_nan, float("-inf"), read)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    peak = tl.max(tile_peaks, axis=0)
    best_tile = tl.min(tl.where(tile_peaks == peak, tiles, TILES), axis=0)
    is_finite = (peak > float("-inf")) & (peak < float("inf")) & (has_nan == 0)
    token = tl.load(tile_tokens_ptr + first + best_tile)
    floor = float("-inf")
    if (inverse > 0) & is_finite:
        start = logits_ptr + line.to(tl.int64) * stride
        scales = tl.exp((tile_peaks - peak).to(tl.float64) * inverse)
        scores = tl.load(scores_ptr + first + tiles, mask=held, other=0.0) * scales
        least = 0.0
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            NUM_BLOCKS: tl.constexpr = NUM_TILES * (TILE // 64)
            block, least, floor = draw_kept(
                start,
                block_peaks_ptr + line * NUM_BLOCKS,
                candidates_ptr + line * NUM_BLOCKS,
                peak,
                tl.sum(scores, axis=0),
                key,
                top_k,
                top_p,
                min_p,
                inverse,
                VOCAB,
                NUM_BLOCKS,
                BLOCKS,
            )
        else:
            best = tl.max(scores, axis=0)
            winner = tl.min(tl.where(scores == best, tiles, TILES), axis=0)
            block = tl.load(tile_blocks_ptr + first + winner)
        ids = block * 64 + tl.arange(0, 64)
        values = tl.load(start + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        weights = weights_of(values, peak, inverse)
        weights = tl.where(weights >= least, weights, 0.0)
        inside = weights.to(tl.float64) / exponential(key, ids.to(tl.int64))
        token = tl.min(tl.where(inside == tl.max(inside, axis=0), ids, VOCAB), axis=0)
    tl.store(tokens_ptr + line, tl.where(is_finite, token, 0).to(tl.int64))
    tl.store(peaks_ptr + line, tl.where(has_nan, float("nan"), peak))
    tl.store(floors_ptr + line, floor)
    if not OFFSETS:
        count = table_ptr + tl.load(rows_ptr + line).to(tl.int64) * COLUMNS
        tl.store(count, tl.load(count) + 1)


@triton.jit
def accept(
    tokens_ptr,
    peaks_ptr,
    firsts_ptr,
    guesses_ptr,
    rows_ptr,
    table_ptr,
    accepted_ptr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid [rows]."""
    row = tl.program_id(0)
    first = tl.load(firsts_ptr + row)
    out = accepted_ptr + row * (DEPTH + 4)
    token = tl.load(tokens_ptr + first)
    peak = tl.load(peaks_ptr + first)
    tl.store(out + 2, peak.to(tl.float64).to(tl.int64, bitcast=True))
    tl.store(out + 3, token)
    count = tl.full((), 1, tl.int64)
    going = (peak - peak) == 0.0  # neither infinite nor NaN
    for depth in range(DEPTH):
        guess = tl.load(guesses_ptr + row * DEPTH + depth)
        going = going & (guess == token) & (guess >= 0)
        line = tl.where(going, first + depth + 1, first)
        peak = tl.load(peaks_ptr + line)
        going = going & ((peak - peak) == 0.0)
        token = tl.where(going, tl.load(tokens_ptr + line), token)
        tl.store(out + 4 + depth, tl.where(going, token, -1))
        count += going.to(tl.int64)
    tl.store(out, count)
    tl.store(out + 1, token)
    state = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * COLUMNS
    tl.store(state, tl.load(state) + count)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    drawn: Drawn,
    offsets: torch.Tensor | None = None,
) -> None:
    num, vocab_size = len(drawn.tokens), logits.shape[1]
    if not num:
        return
    num_tiles = triton.cdiv(vocab_size, TILE)
    num_blocks = num_tiles * (TILE // BLOCK)
    device = logits.device
    scores = torch.empty(num * num_tiles, dtype=torch.float64, device=device)
    reals = torch.empty(num * (num_tiles + num_blocks), dtype=torch.float32, device=device)
    whole = torch.empty(num * (2 * num_tiles + num_blocks), dtype=torch.int32, device=device)
    tile_peaks, block_peaks = reals[: num * num_tiles], reals[num * num_tiles :]
    tile_tokens, tile_blocks = whole[: num * num_tiles], whole[num * num_tiles :]
    candidates = whole[2 * num * num_tiles :]
    options = launch_options(device)
    scan[(num_tiles, num)](
        logits,
        rows,
        offsets,
        table,
        scores,
        tile_peaks,
        tile_tokens,
        tile_blocks,
        block_peaks,
        logits.stride(0),
        vocab_size,
        TILE,
        COLUMNS,
        offsets is not None,
        num_warps=4,
        **options,
    )
    pick[(num,)](
        logits,
        rows,
        offsets,
        table,
        scores,
        tile_peaks,
        tile_tokens,
        tile_blocks,
        block_peaks,
        candidates,
        drawn.tokens,
        drawn.peaks,
        drawn.floors,
        logits.stride(0),
        vocab_size,
        num_tiles,
        triton.next_power_of_2(num_tiles),
        TILE,
        triton.next_power_of_2(num_blocks),
        COLUMNS,
        offsets is not None,
        num_warps=8,
        **options,
    )


def accept_chain(
    drawn: Drawn,
    firsts: torch.Tensor,
    guesses: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    size, depth = guesses.shape
    if size:
        accept[(size,)](
            drawn.tokens,
            drawn.peaks,
            firsts,
            guesses,
            rows,
            table,
            accepted,
            depth,
            COLUMNS,
            num_warps=1,
        )
