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

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher, next_power_of_two
from kernels.sample.table import COLUMNS, Drawn
from kernels.sample.triton_kernel import draw_kept, exponential, position_key, weights_of

if TYPE_CHECKING:
    from kernels.sample import AcceptChain, Sample

BLOCK = 64
TILE = 4096
LISTED = 512  # weights compared with each other


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
    scratch_ptr, line, TILES: tl.constexpr, NUM_BLOCKS: tl.constexpr, CAPACITY: tl.constexpr
):
    """What `scan` leaves for `pick` of one line: per tile the score, peak, likeliest token and winning
    block; per block its peak; and room for as many ids, and for a list of weights. TILES is even."""
    scores = scratch_ptr + line.to(tl.int64) * (TILES // 2 * 5 + NUM_BLOCKS + CAPACITY // 2)
    peaks = (scores + TILES).to(tl.pointer_type(tl.float32), bitcast=True)
    tokens = (peaks + TILES).to(tl.pointer_type(tl.int32), bitcast=True)
    blocks = tokens + TILES
    block_peaks = (blocks + TILES).to(tl.pointer_type(tl.float32), bitcast=True)
    candidates = (block_peaks + NUM_BLOCKS).to(tl.pointer_type(tl.int32), bitcast=True)
    listed = (candidates + NUM_BLOCKS).to(tl.pointer_type(tl.float32), bitcast=True)
    return scores, peaks, tokens, blocks, block_peaks, candidates, listed


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
    CAPACITY: tl.constexpr,
    COLUMNS: tl.constexpr,
    OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [tiles, lines]. scratch: float64, see `line_scratch`; the blocks' peaks only of rows with a
    rule that cuts, whose scores are masses."""
    BLOCKS: tl.constexpr = TILE // 64
    tile, line = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key, top_k, top_p, min_p, inverse = line_state(
        rows_ptr, offsets_ptr, table_ptr, line, COLUMNS, OFFSETS
    )
    scores_out, peaks_out, tokens_out, blocks_out, block_peaks_out, _, _ = line_scratch(
        scratch_ptr, line, TILES, TILES * BLOCKS, CAPACITY
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
        masses = tl.sum(weights, axis=1).to(tl.float64)
        blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            block_peaks = tl.max(tl.reshape(values, (BLOCKS, 64)), axis=1)
            tl.store(block_peaks_out + blocks, block_peaks)
            tl.store(scores_out + tile, tl.sum(masses, axis=0))
        else:
            scores = masses / exponential(key, blocks.to(tl.int64) + (1 << 40))
            best = tl.max(scores, axis=0)
            winner = tl.min(tl.where(scores == best, blocks, 1 << 30), axis=0)
            tl.store(scores_out + tile, best)
            tl.store(blocks_out + tile, winner)


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
    NUM_TILES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    TILES_HELD: tl.constexpr,
    BLOCKS_HELD: tl.constexpr,
    CAPACITY: tl.constexpr,
    COLUMNS: tl.constexpr,
    OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [lines]. drawn: int64, see `Drawn`. *_HELD are powers of two that are large enough."""
    line, num_lines = tl.program_id(0), tl.num_programs(0)
    NUM_BLOCKS: tl.constexpr = NUM_TILES * (TILE // 64)
    tiles = tl.arange(0, TILES_HELD)
    held = tiles < NUM_TILES
    scores_in, peaks_in, tokens_in, blocks_in, block_peaks_in, candidates, listed = line_scratch(
        scratch_ptr, line, TILES, TILES * (TILE // 64), CAPACITY
    )
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key, top_k, top_p, min_p, inverse = line_state(
        rows_ptr, offsets_ptr, table_ptr, line, COLUMNS, OFFSETS
    )
    read = tl.load(peaks_in + tiles, mask=held, other=float("-inf"))
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
        scales = tl.exp((tile_peaks - peak).to(tl.float64) * inverse)
        scores = tl.load(scores_in + tiles, mask=held, other=0.0) * scales
        least = 0.0
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            block, least, floor = draw_kept(
                start,
                block_peaks_in,
                candidates,
                listed,
                peak,
                tl.sum(scores, axis=0),
                key,
                top_k,
                top_p,
                min_p,
                inverse,
                VOCAB,
                NUM_BLOCKS,
                BLOCKS_HELD,
                CAPACITY,
            )
        else:
            best = tl.max(scores, axis=0)
            winner = tl.min(tl.where(scores == best, tiles, TILES_HELD), axis=0)
            block = tl.load(blocks_in + winner)
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


@triton.jit
def accept(
    drawn_ptr,
    firsts_ptr,
    guesses_ptr,
    rows_ptr,
    table_ptr,
    accepted_ptr,
    num_lines,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [rows]."""
    row = tl.program_id(0)
    peaks_ptr = (drawn_ptr + num_lines).to(tl.pointer_type(tl.float32), bitcast=True)
    out = accepted_ptr + row * (DEPTH + 4)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(firsts_ptr + row)
    token = tl.load(drawn_ptr + first)
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
        token = tl.where(going, tl.load(drawn_ptr + line), token)
        tl.store(out + 4 + depth, tl.where(going, token, -1))
        count += going.to(tl.int64)
    tl.store(out, count)
    tl.store(out + 1, token)
    state = table_ptr + tl.load(rows_ptr + row).to(tl.int64) * COLUMNS
    tl.store(state, tl.load(state) + count)


def bind() -> tuple[Sample, AcceptChain]:
    launch_scan, launch_pick, launch_accept = Launcher(scan), Launcher(pick), Launcher(accept)

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
        num_tiles = -(-vocab_size // TILE)
        tiles = num_tiles + num_tiles % 2
        words = tiles // 2 * 5 + tiles * (TILE // BLOCK) + LISTED // 2
        scratch = torch.empty(num * words, dtype=torch.float64, device=logits.device)
        shape = (logits.stride(0), vocab_size)
        launch_scan(
            (num_tiles, num, 1),
            (logits, rows, offsets, table, scratch),
            (),
            (*shape, tiles, TILE, LISTED, COLUMNS, offsets is not None),
        )
        held = next_power_of_two(num_tiles)
        launch_pick(
            (num, 1, 1),
            (logits, rows, offsets, table, scratch, drawn.memory),
            (),
            (
                *shape,
                num_tiles,
                tiles,
                TILE,
                held,
                held * (TILE // BLOCK),
                LISTED,
                COLUMNS,
                offsets is not None,
            ),
            num_warps=8,
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
            launch_accept(
                (size, 1, 1),
                (drawn.memory, firsts, guesses, rows, table, accepted),
                (len(drawn),),
                (depth, COLUMNS),
                num_warps=1,
            )

    return sample, accept_chain
