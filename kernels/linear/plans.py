"""Which kernel, and in what shape, for a weight [N, K] and a number of tokens.

Measured, not searched for at run time: the tables come from `python -m bench.kernels.linear_gpu` on an
H200; shapes that are not in them take the rules below. A plan changes speed and the order of float32
sums, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TOKEN_TILES = (1, 2, 4, 16, 32, 64, 128, 256)  # tokens that are planned for; others as the next
SMALLEST_TILE, LARGEST_TILE = 16, TOKEN_TILES[-1]
FEW = 64  # tokens; for more than these only what was measured is ours


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """For `stream.stream_rows`. `stages` 1: loads into registers, else through shared memory.
    `prefetch`: columns that the first `wave` programs ask for while the kernel before still runs.
    `late`: the next kernel's programs come when this one's have read their weights, not at once."""

    rows: int
    block: int
    stages: int
    warps: int
    prefetch: int = 0
    wave: int = 528
    late: bool = False


@dataclass(frozen=True, slots=True)
class TilePlan:
    """For `tiles.tile_rows`."""

    rows: int
    block: int
    stages: int
    warps: int
    splits: int = 1
    pieces: int = 1
    tokens: int = 0  # a tile takes; 0: as many as there are, see `token_tile`
    prefetch: int = 0
    wave: int = 528


Plan = StreamPlan | TilePlan
Table = dict[tuple[int, int, int], Plan | None]  # by N, K and tokens of TOKEN_TILES

PLAIN: Table = {
    (6144, 4096, 1): StreamPlan(8, 1024, 3, 4, 1024, 528, late=True),
    (4096, 4096, 1): StreamPlan(16, 512, 4, 8, late=True),
    (28672, 4096, 1): StreamPlan(4, 1024, 4, 4, 1024, 528, late=True),
    (4096, 14336, 1): StreamPlan(4, 1024, 1, 4, 1024, 528, late=True),
    (128256, 4096, 1): StreamPlan(16, 512, 4, 8, late=True),
    (4096, 1024, 1): StreamPlan(4, 1024, 4, 4, 2048, 1056, late=True),
    (1024, 2048, 1): StreamPlan(4, 1024, 1, 4, 2048, 1056, late=True),
    (6144, 1024, 1): StreamPlan(2, 1024, 4, 4, 1024, 528, late=True),
    (1024, 3072, 1): StreamPlan(8, 1024, 3, 4, 1024, 528, late=True),
    (151936, 1024, 1): StreamPlan(4, 1024, 4, 4, 2048, 1056, late=True),
    (7168, 5120, 1): StreamPlan(4, 1024, 4, 4, 1024, 528),
    (5120, 5120, 1): StreamPlan(8, 512, 4, 4, 1024, 528),
    (34816, 5120, 1): StreamPlan(4, 1024, 1, 4, 2048, 1056),
    (5120, 17408, 1): StreamPlan(8, 1024, 3, 4),
    (151936, 5120, 1): StreamPlan(4, 1024, 1, 4, 2048, 1056),
    (6144, 4096, 16): TilePlan(32, 256, 4, 2, 2, prefetch=256, wave=132),
    (6144, 4096, 32): TilePlan(64, 256, 3, 4, 1, tokens=32),
    (6144, 4096, 64): TilePlan(64, 128, 4, 4, 1, tokens=64),
    (4096, 4096, 16): TilePlan(64, 128, 6, 4, 1, prefetch=256, wave=264),
    (4096, 4096, 32): TilePlan(64, 256, 3, 4, 2, tokens=32, prefetch=256, wave=132),
    (4096, 4096, 64): None,
    (28672, 4096, 16): TilePlan(64, 128, 4, 4, 1, prefetch=256, wave=264),
    (28672, 4096, 32): TilePlan(64, 128, 4, 4, 1, tokens=32),
    (28672, 4096, 64): TilePlan(128, 128, 4, 8, 1, tokens=64),
    (4096, 14336, 16): TilePlan(64, 128, 6, 4, 2, prefetch=256, wave=132),
    (4096, 14336, 32): TilePlan(64, 256, 3, 4, 2, tokens=32, prefetch=256, wave=132),
    (4096, 14336, 64): TilePlan(64, 128, 4, 4, 2, tokens=64, prefetch=256, wave=132),
    (128256, 4096, 16): TilePlan(64, 128, 4, 4, 1),
    (128256, 4096, 32): TilePlan(128, 128, 4, 4, 1, tokens=32),
    (128256, 4096, 64): TilePlan(128, 128, 4, 8, 1, tokens=64),
    (4096, 1024, 16): TilePlan(64, 128, 6, 4, 1, prefetch=256, wave=264),
    (4096, 1024, 32): TilePlan(64, 256, 3, 4, 1, tokens=32, prefetch=256, wave=264),
    (4096, 1024, 64): TilePlan(64, 128, 4, 4, 1, tokens=64, prefetch=256, wave=264),
    (1024, 2048, 16): TilePlan(64, 128, 6, 4, 4, prefetch=256, wave=66),
    (1024, 2048, 32): TilePlan(64, 256, 3, 4, 4, tokens=32, prefetch=256, wave=66),
    (1024, 2048, 64): TilePlan(64, 128, 4, 4, 4, tokens=64, prefetch=256, wave=66),
    (6144, 1024, 16): TilePlan(64, 128, 6, 4, 1, prefetch=256, wave=264),
    (6144, 1024, 32): TilePlan(64, 256, 3, 4, 1, tokens=32),
    (6144, 1024, 64): TilePlan(64, 128, 4, 4, 1, tokens=64, prefetch=256, wave=264),
    (1024, 3072, 16): TilePlan(64, 128, 6, 4, 4, prefetch=256, wave=66),
    (1024, 3072, 32): TilePlan(64, 256, 3, 4, 4, tokens=32, prefetch=256, wave=66),
    (1024, 3072, 64): TilePlan(64, 128, 4, 4, 4, tokens=64, prefetch=256, wave=66),
    (151936, 1024, 16): TilePlan(64, 128, 4, 4, 1, prefetch=256, wave=264),
    (151936, 1024, 32): TilePlan(64, 128, 4, 4, 1, tokens=32, prefetch=256, wave=264),
    (151936, 1024, 64): TilePlan(128, 128, 4, 8, 1, tokens=64, prefetch=256, wave=264),
    (7168, 5120, 16): TilePlan(64, 128, 6, 4, 1, prefetch=256, wave=264),
    (7168, 5120, 32): TilePlan(64, 256, 3, 4, 1, prefetch=256, wave=264),
    (7168, 5120, 64): None,
    (5120, 5120, 16): None,
    (5120, 5120, 32): None,
    (5120, 5120, 64): None,
    (34816, 5120, 16): TilePlan(32, 256, 4, 2, 1),
    (34816, 5120, 32): None,
    (34816, 5120, 64): None,
    (5120, 17408, 16): TilePlan(32, 256, 4, 2, 4),
    (5120, 17408, 32): None,
    (5120, 17408, 64): None,
    (151936, 5120, 16): TilePlan(64, 128, 4, 4, 1),
    (151936, 5120, 32): TilePlan(128, 128, 4, 4, 1),
    (151936, 5120, 64): TilePlan(128, 128, 4, 8, 1),
    (6144, 1024, 128): TilePlan(64, 128, 4, 4, 1, tokens=128, prefetch=256, wave=264),
    (6144, 1024, 256): TilePlan(128, 64, 4, 8, 1, tokens=128, prefetch=256, wave=264),
}
INT4: Table = {}
FP8: Table = {
    (6144, 4096, 1): StreamPlan(8, 1024, 3, 4),
    (6144, 4096, 16): TilePlan(64, 256, 6, 4, 1, tokens=16),
    (6144, 4096, 2): TilePlan(64, 256, 6, 4, 1, tokens=16),
    (6144, 4096, 4): TilePlan(64, 256, 6, 4, 1, tokens=16),
    (6144, 4096, 32): TilePlan(64, 512, 3, 4, 1, tokens=32),
    (6144, 4096, 64): TilePlan(64, 256, 4, 4, 1, tokens=64),
    (6144, 4096, 128): TilePlan(64, 128, 6, 4, 1, tokens=128),
    (6144, 4096, 256): None,
    (4096, 4096, 1): StreamPlan(8, 1024, 3, 4),
    (4096, 4096, 16): TilePlan(64, 256, 6, 4, 2, tokens=16),
    (4096, 4096, 2): TilePlan(64, 256, 6, 4, 2, tokens=16),
    (4096, 4096, 4): TilePlan(64, 256, 6, 4, 2, tokens=16),
    (4096, 4096, 32): TilePlan(64, 512, 3, 4, 2, tokens=32),
    (4096, 4096, 64): TilePlan(64, 256, 4, 4, 2, tokens=64),
    (4096, 4096, 128): TilePlan(64, 128, 6, 4, 1, tokens=128),
    (4096, 4096, 256): TilePlan(64, 128, 6, 4, 1, tokens=128),
    (28672, 4096, 1): StreamPlan(8, 512, 4, 4),
    (28672, 4096, 16): TilePlan(64, 256, 4, 4, 1, tokens=16),
    (28672, 4096, 2): TilePlan(64, 256, 4, 4, 1, tokens=16),
    (28672, 4096, 4): TilePlan(64, 256, 4, 4, 1, tokens=16),
    (28672, 4096, 32): TilePlan(64, 256, 4, 4, 1, tokens=32),
    (28672, 4096, 64): TilePlan(128, 256, 4, 8, 1, tokens=64),
    (28672, 4096, 128): None,
    (28672, 4096, 256): None,
    (4096, 14336, 1): StreamPlan(8, 1024, 3, 4),
    (4096, 14336, 16): TilePlan(64, 256, 6, 4, 2, tokens=16),
    (4096, 14336, 2): TilePlan(64, 256, 6, 4, 2, tokens=16),
    (4096, 14336, 4): TilePlan(64, 256, 6, 4, 2, tokens=16),
    (4096, 14336, 32): TilePlan(64, 512, 3, 4, 2, tokens=32),
    (4096, 14336, 64): TilePlan(64, 256, 4, 4, 2, tokens=64),
    (4096, 14336, 128): TilePlan(64, 128, 6, 4, 2, tokens=128),
    (4096, 14336, 256): TilePlan(64, 128, 6, 4, 1, tokens=128),
    (7168, 5120, 1): StreamPlan(8, 512, 4, 4),
    (7168, 5120, 16): TilePlan(64, 256, 6, 4, 1, tokens=16),
    (7168, 5120, 2): TilePlan(64, 256, 6, 4, 1, tokens=16),
    (7168, 5120, 4): TilePlan(64, 256, 6, 4, 1, tokens=16),
    (7168, 5120, 32): TilePlan(64, 512, 3, 4, 1, tokens=32),
    (7168, 5120, 64): TilePlan(64, 256, 4, 4, 1, tokens=64),
    (7168, 5120, 128): TilePlan(64, 128, 6, 4, 1, tokens=128),
    (7168, 5120, 256): None,
    (5120, 5120, 1): StreamPlan(8, 512, 4, 4),
    (5120, 5120, 16): TilePlan(64, 256, 4, 4, 1, tokens=16),
    (5120, 5120, 2): TilePlan(64, 256, 4, 4, 1, tokens=16),
    (5120, 5120, 4): TilePlan(64, 256, 4, 4, 1, tokens=16),
    (5120, 5120, 32): TilePlan(64, 512, 3, 4, 1, tokens=32),
    (5120, 5120, 64): TilePlan(64, 256, 4, 4, 1, tokens=64),
    (5120, 5120, 128): TilePlan(64, 256, 4, 4, 1, tokens=128),
    (5120, 5120, 256): None,
    (34816, 5120, 1): StreamPlan(8, 512, 4, 4),
    (34816, 5120, 16): TilePlan(64, 256, 4, 4, 1, tokens=16),
    (34816, 5120, 2): TilePlan(64, 256, 4, 4, 1, tokens=16),
    (34816, 5120, 4): TilePlan(64, 256, 4, 4, 1, tokens=16),
    (34816, 5120, 32): TilePlan(64, 256, 4, 4, 1, tokens=32),
    (34816, 5120, 64): TilePlan(128, 256, 4, 8, 1, tokens=64),
    (34816, 5120, 128): None,
    (34816, 5120, 256): None,
    (5120, 17408, 1): StreamPlan(8, 512, 4, 4),
    (5120, 17408, 16): TilePlan(64, 256, 4, 4, 4, tokens=16),
    (5120, 17408, 2): TilePlan(64, 256, 4, 4, 4, tokens=16),
    (5120, 17408, 4): TilePlan(64, 256, 4, 4, 4, tokens=16),
    (5120, 17408, 32): TilePlan(64, 256, 4, 4, 4, tokens=32),
    (5120, 17408, 64): TilePlan(64, 256, 4, 4, 1, tokens=64),
    (5120, 17408, 128): TilePlan(64, 256, 4, 4, 1, tokens=128),
    (5120, 17408, 256): None,
}

MULTIPROCESSORS = 132
SMALL = 8 << 20  # elements of a weight, up to which tiles beat the library for any few tokens
WIDE_TILE = 128 * 128
BYTES = {"plain": 2, "library": 4, "fp8": 1, "int4": 2}  # of what a product multiplies


class Plans:
    """Those of one weight. `kind`: "plain", "fp8" or "int4" for what it is stored in; "library": a plain
    one whose products are the library's, but for one token. `invariant`: no token's result depends on
    how many there are, so K is cut alike for all. `room`: bytes of shared memory that a program has."""

    def __init__(self, num_rows: int, size: int, *, kind: str, invariant: bool, room: int) -> None:
        self._many: Plan | None = None
        if invariant:
            few = fill_device(num_rows, size, rows=64, block=128, stages=4)
            self._many = many_alike(few, kind)
            self._few: dict[int, Plan | None] = {
                tokens: few if tokens <= FEW else self._many for tokens in TOKEN_TILES
            }
        else:
            self._few = {tokens: few_plan(num_rows, size, tokens, kind) for tokens in TOKEN_TILES}
            if kind == "fp8" and (num_rows % 16 or size % 16):  # what the library does not take
                self._many = many_alike(TilePlan(rows=64, block=128, stages=4, warps=4), kind)
                self._few |= {tokens: self._many for tokens in TOKEN_TILES if tokens > FEW}
        self._many = fit(self._many, LARGEST_TILE, kind, room)
        self._few = {tokens: fit(plan, tokens, kind, room) for tokens, plan in self._few.items()}

    def find(self, num_tokens: int) -> Plan | None:
        """None: the library's turn, and for no tokens too."""
        if num_tokens > LARGEST_TILE:
            return self._many
        return self._few[token_tile(num_tokens)] if num_tokens else None


def few_plan(num_rows: int, size: int, tokens: int, kind: str) -> Plan | None:
    """`tokens`: of TOKEN_TILES. None: the library is as fast."""
    if kind == "library":
        return any_stream(kind) if tokens == 1 else None
    table = {"plain": PLAIN, "fp8": FP8, "int4": INT4}[kind]
    for measured in (tokens, SMALLEST_TILE if 1 < tokens <= FEW else tokens):
        if (num_rows, size, measured) in table:
            return table[num_rows, size, measured]
    if tokens > FEW:
        return None
    if tokens == 1 and kind != "int4":
        return any_stream(kind)
    if kind == "plain" and tokens > SMALLEST_TILE and num_rows * size > SMALL:
        return None
    block = 256 if kind == "fp8" else 128
    return fill_device(num_rows, size, rows=64, block=block, stages=4)


def fit(plan: Plan | None, tokens: int, kind: str, room: int) -> Plan | None:
    """The same in fewer or shorter stages where a program has no room for all of them. No sum changes
    with it."""
    if not isinstance(plan, TilePlan):
        return plan
    tokens, block = plan.tokens or max(tokens, SMALLEST_TILE), plan.block
    if plan.rows * tokens >= WIDE_TILE:
        room -= 4 * plan.rows * tokens  # its sums may pass through shared memory of their own
    column = (plan.rows + tokens) * BYTES[kind]
    while block * column > room:
        block //= 2
    stages = room // (block * column) + 1  # one is in registers
    return replace(plan, block=block, stages=min(plan.stages, stages))


def any_stream(kind: str) -> StreamPlan:
    return StreamPlan(rows=8 if kind == "fp8" else 4, block=1024, stages=4, warps=4, late=True)


def many_alike(few: TilePlan, kind: str) -> TilePlan:
    """For more than FEW tokens, to the bit what `few` gives each of them."""
    if kind == "int4":
        return TilePlan(rows=64, block=128, stages=3, warps=4, pieces=few.splits, tokens=64)
    stages = 2 if kind == "library" else 4  # float32 takes twice the shared memory
    return TilePlan(rows=128, block=64, stages=stages, warps=8, pieces=few.splits, tokens=128)


def token_tile(num_tokens: int) -> int:
    return next((tile for tile in TOKEN_TILES if num_tokens <= tile), LARGEST_TILE)


def fill_device(num_rows: int, size: int, *, rows: int, block: int, stages: int) -> TilePlan:
    """K is cut until every multiprocessor has about two programs, or too little is left of it."""
    tiles, splits = -(-num_rows // rows), 1
    while tiles * splits < 2 * MULTIPROCESSORS and size % (2 * splits * block) == 0:
        splits *= 2
        if size // splits < 4 * block:
            break
    return TilePlan(rows=rows, block=block, stages=stages, warps=4, splits=splits)
