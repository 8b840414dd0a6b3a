"""Which kernel, and in what shape, for a weight [N, K] and a number of tokens.

Measured, not searched for at run time: the tables come from `python -m bench.kernels.linear_gpu` on an
H200; shapes that are not in them take the rules below. A plan changes speed and the order of float32
sums, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKEN_TILES = (16, 32, 64)  # how many tokens a program of `tiles` takes at once
LARGEST_TILE = TOKEN_TILES[-1]


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """For `stream.stream_rows`. `stages` 1: loads into registers, else through shared memory.
    `prefetch`: columns that the first `wave` programs ask for while the kernel before still runs."""

    rows: int
    block: int
    stages: int
    warps: int
    prefetch: int = 0
    wave: int = 528


@dataclass(frozen=True, slots=True)
class TilePlan:
    """For `tiles.tile_rows`."""

    rows: int
    block: int
    stages: int
    warps: int
    splits: int = 1
    prefetch: int = 0
    wave: int = 528


STREAM: dict[tuple[int, int], StreamPlan] = {
    (6144, 4096): StreamPlan(8, 1024, 3, 4),
    (4096, 4096): StreamPlan(16, 512, 4, 8),
    (28672, 4096): StreamPlan(8, 512, 4, 4),
    (4096, 14336): StreamPlan(4, 1024, 1, 4),
    (128256, 4096): StreamPlan(4, 1024, 4, 4),
    (4096, 1024): StreamPlan(4, 1024, 4, 4),
    (1024, 2048): StreamPlan(8, 1024, 1, 4),
    (6144, 1024): StreamPlan(4, 1024, 4, 4),
    (1024, 3072): StreamPlan(8, 1024, 3, 4),
    (151936, 1024): StreamPlan(4, 1024, 4, 4),
    (7168, 5120): StreamPlan(4, 1024, 4, 4),
    (5120, 5120): StreamPlan(8, 512, 4, 4),
    (34816, 5120): StreamPlan(4, 1024, 4, 4),
    (5120, 17408): StreamPlan(8, 1024, 3, 4),
    (151936, 5120): StreamPlan(4, 1024, 4, 4),
}
TILES: dict[tuple[int, int, int], TilePlan | None] = {}
STREAM_FP8: dict[tuple[int, int], StreamPlan] = {}
INT4: dict[tuple[int, int, int], TilePlan] = {}
TILES_FP8: dict[tuple[int, int, int], TilePlan | None] = {}

MULTIPROCESSORS = 132
SMALL = 8 << 20  # elements of a weight, up to which tiles beat the library


def stream_plan(num_rows: int, size: int, stored: str = "") -> StreamPlan:
    """One token. `stored`: "fp8" for such weights."""
    if stored == "fp8":
        return STREAM_FP8.get((num_rows, size), StreamPlan(rows=8, block=1024, stages=4, warps=4))
    found = STREAM.get((num_rows, size))
    if found is not None:
        return found
    return StreamPlan(rows=4, block=1024, stages=4, warps=4)


def int4_plan(num_rows: int, size: int, num_tokens: int) -> TilePlan:
    """1 to LARGEST_TILE tokens of an int4 weight; `block` is the kernel's business."""
    found = INT4.get((num_rows, size, token_tile(num_tokens)))
    return found or fill_device(num_rows, size, rows=64, block=128, stages=4)


def token_tile(num_tokens: int) -> int:
    return next((tile for tile in TOKEN_TILES if num_tokens <= tile), LARGEST_TILE)


def tile_plan(num_rows: int, size: int, num_tokens: int, stored: str = "") -> TilePlan | None:
    """2 to LARGEST_TILE tokens; None: the vendor's library is as fast."""
    if num_tokens > LARGEST_TILE:
        return None
    tile = token_tile(num_tokens)
    table = TILES_FP8 if stored == "fp8" else TILES
    if (num_rows, size, tile) in table:
        return table[num_rows, size, tile]
    if stored == "fp8":
        return fill_device(num_rows, size, rows=64, block=256, stages=4)
    if num_rows * size > SMALL:
        return None
    return fill_device(num_rows, size, rows=64, block=128, stages=4)


def fill_device(num_rows: int, size: int, *, rows: int, block: int, stages: int) -> TilePlan:
    """K is cut until every multiprocessor has about two programs, or too little is left of it."""
    tiles, splits = -(-num_rows // rows), 1
    while tiles * splits < 2 * MULTIPROCESSORS and size % (2 * splits * block) == 0:
        splits *= 2
        if size // splits < 4 * block:
            break
    return TilePlan(rows=rows, block=block, stages=stages, warps=4, splits=splits)
