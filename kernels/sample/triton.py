"""Sampling on the GPU in two kernels, whatever the rows ask for.

scan   a block per (line, tile of the vocabulary) reads the logits once: the tile's largest, and of a row
       that is drawn the masses and the largest logits of the tile's blocks of 64 ids
pick   a block per line puts the tiles together; a rule that cuts finds its least weight here, by
       `kernels.sample.triton_kernel`; then the race between the blocks, and inside the one that won

Sums have a fixed order that depends on the vocabulary's size alone, so a line's token does not depend on
what else is in the batch. Masses are relative to their tile's largest logit in `scan`, to the line's in
`pick`: the law is the same, the last bit of a weight may not be that of the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher, next_power_of_two
from kernels.sample.table import COLUMNS, Drawn
from kernels.sample.triton_kernel import draw_kept, exponential, position_key, weights_of

if TYPE_CHECKING:
    from kernels.sample import Sample

BLOCK = 64
TILE = 4096
LISTED = 16384 + 512  # weights, see `kernels.sample.triton_kernel`


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
def line_scratch(
    scratch_ptr, line, TILES: tl.constexpr, NUM_BLOCKS: tl.constexpr, LISTED: tl.constexpr
):
    """What `scan` leaves for `pick` of one line: each tile's peak and likeliest token, each block's mass
    and peak; then room for as many ids of blocks, and for LISTED weights. float32 and int32."""
    peaks = scratch_ptr + line.to(tl.int64) * (2 * TILES + 3 * NUM_BLOCKS + LISTED)
    tokens = (peaks + TILES).to(tl.pointer_type(tl.int32), bitcast=True)
    masses = peaks + 2 * TILES
    block_peaks = masses + NUM_BLOCKS
    listed = block_peaks + NUM_BLOCKS
    candidates = (listed + LISTED).to(tl.pointer_type(tl.int32), bitcast=True)
    return peaks, tokens, masses, block_peaks, listed, candidates


@triton.jit
def scan(
    logits_ptr,
    rows_ptr,
    offsets_ptr,
    table_ptr,
    scratch_ptr,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
    COLUMNS: tl.constexpr,
    OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [tiles, lines]. scratch: see `line_scratch`; blocks only of rows that are drawn."""
    BLOCKS: tl.constexpr = TILE // 64
    tile, line = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    peaks_out, tokens_out, masses_out, block_peaks_out, _, _ = line_scratch(
        scratch_ptr, line, TILES, TILES * BLOCKS, LISTED
    )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _, top_k, top_p, min_p, inverse = line_state(
        rows_ptr, offsets_ptr, table_ptr, line, COLUMNS, OFFSETS
    )
    start = logits_ptr + line.to(tl.int64) * STRIDE
    read = tl.load(start + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    is_nan = read != read
    values = tl.where(is_nan, float("-inf"), read)
    peak = tl.max(values, axis=0)
    token = tl.min(tl.where(values == peak, ids, VOCAB), axis=0)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    tl.store(peaks_out + tile, tl.where(has_nan, float("nan"), peak))
    tl.store(tokens_out + tile, token)
    if inverse > 0:
        zero = tl.where((peak > float("-inf")) & (peak < float("inf")), peak, 0.0)
        weights = tl.reshape(weights_of(values, zero, inverse), (BLOCKS, 64))
        blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
        tl.store(masses_out + blocks, tl.sum(weights, axis=1))
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            block_peaks = tl.max(tl.reshape(values, (BLOCKS, 64)), axis=1)
            tl.store(block_peaks_out + blocks, block_peaks)


@triton.jit
def pick(
    logits_ptr,
    rows_ptr,
    offsets_ptr,
    table_ptr,
    scratch_ptr,
    drawn_ptr,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    TILES_HELD: tl.constexpr,
    LISTED: tl.constexpr,
    COLUMNS: tl.constexpr,
    OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [lines]. drawn: int64, see `Drawn`. TILES_HELD is the power of two from TILES on."""
    line, num_lines = tl.program_id(0), tl.num_programs(0)
    BLOCKS: tl.constexpr = TILE // 64
    NUM_BLOCKS: tl.constexpr = TILES * BLOCKS
    tiles = tl.arange(0, TILES_HELD)
    peaks_in, tokens_in, masses_in, block_peaks_in, listed, candidates = line_scratch(
        scratch_ptr, line, TILES, NUM_BLOCKS, LISTED
    )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key, top_k, top_p, min_p, inverse = line_state(
        rows_ptr, offsets_ptr, table_ptr, line, COLUMNS, OFFSETS
    )
    read = tl.load(peaks_in + tiles, mask=tiles < TILES, other=float("-inf"))
    is_nan = read != read
    tile_peaks = tl.where(is_nan, float("-inf"), read)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    peak = tl.max(tile_peaks, axis=0)
    best_tile = tl.min(tl.where(tile_peaks == peak, tiles, TILES_HELD), axis=0)
    is_finite = (peak > float("-inf")) & (peak < float("inf")) & (has_nan == 0)
    token = tl.load(tokens_in + best_tile)
    floor = float("-inf")
    if (inverse > 0) & is_finite:
        start = logits_ptr + line.to(tl.int64) * STRIDE
        blocks = tl.arange(0, TILES_HELD * BLOCKS)
        held = blocks < NUM_BLOCKS
        of_tile = tl.load(peaks_in + blocks // BLOCKS, mask=held, other=float("-inf"))
        masses = tl.load(masses_in + blocks, mask=held, other=0.0).to(tl.float64)
        masses *= weights_of(of_tile, peak, inverse).to(tl.float64)
        least = 0.0
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            block, least, floor = draw_kept(
                start,
                block_peaks_in,
                candidates,
                listed,
                peak,
                tl.sum(masses, axis=0),
                key,
                top_k,
                top_p,
                min_p,
                inverse,
                VOCAB,
                NUM_BLOCKS,
                TILES_HELD * BLOCKS,
                LISTED,
            )
        else:
            scores = masses / exponential(key, blocks.to(tl.int64) + (1 << 40))
            best = tl.max(scores, axis=0)
            block = tl.min(tl.where(scores == best, blocks, NUM_BLOCKS), axis=0)
        ids = block * 64 + tl.arange(0, 64)
        values = tl.load(start + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
        weights = weights_of(values, peak, inverse)
        weights = tl.where(weights >= least, weights, 0.0)
        inside = weights.to(tl.float64) / exponential(key, ids.to(tl.int64))
        token = tl.min(tl.where(inside == tl.max(inside, axis=0), ids, VOCAB), axis=0)
    tl.store(drawn_ptr + line, tl.where(is_finite, token, 0).to(tl.int64))
    peaks_out = (drawn_ptr + num_lines).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(peaks_out + line, tl.where(has_nan, float("nan"), peak))
    tl.store(peaks_out + num_lines + line, floor)
    if not OFFSETS:
        count = table_ptr + tl.load(rows_ptr + line).to(tl.int64) * COLUMNS
        tl.store(count, tl.load(count) + 1)


def bind() -> Sample:
    launch_scan, launch_pick = Launcher(scan), Launcher(pick)

    def sample(
        logits: torch.Tensor,
        rows: torch.Tensor,
        table: torch.Tensor,
        drawn: Drawn,
        offsets: torch.Tensor | None = None,
    ) -> None:
        num, vocab_size = len(drawn), logits.shape[1]
        if not num:
            return
        tiles = -(-vocab_size // TILE)
        words = 2 * tiles + 3 * tiles * (TILE // BLOCK) + LISTED
        scratch = torch.empty(num * words, dtype=torch.float32, device=logits.device)
        read = (logits, rows, offsets, table, scratch)
        shape = (logits.stride(0), vocab_size, tiles, TILE)
        rest = (LISTED, COLUMNS, offsets is not None)
        launch_scan((tiles, num, 1), read, (), (*shape, *rest))
        held = next_power_of_two(tiles)
        launch_pick((num, 1, 1), (*read, drawn.memory), (), (*shape, held, *rest), num_warps=16)

    return sample
