"""Which kernel, and in what shape, for a number of tokens. A plan changes speed and the order of float32
sums, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class FewPlan:
    """For `few.gate_few`."""

    rows: int
    block: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class DownPlan:
    """For `few.down_few`, which takes 8 columns of a thread at a time."""

    rows: int
    warps: int

    @property
    def block(self) -> int:
        return 256 * self.warps


@dataclass(frozen=True, slots=True)
class TilePlan:
    """For `grouped.multiply_blocks`: entries and rows of a tile, columns of a step. `swap`: the rows are
    the tensor cores' large side."""

    rows: int
    block: int
    stages: int
    warps: int
    swap: bool = False


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """For `large.multiply_tiles`, or `stream_tiles`. `registers`: most of a thread; 0: as many as there
    are."""

    rows: int
    block: int
    stages: int
    warps: int
    registers: int = 0
    streams: int = 0  # programs of `stream_tiles` on each multiprocessor; 0: `multiply_tiles`


GroupPlan = TilePlan | FetchPlan


@dataclass(frozen=True, slots=True)
class Plan:
    """`tile`: entries that share a tile; 0: the kernels of few tokens."""

    tile: int
    gate_up: FewPlan | GroupPlan
    down: DownPlan | GroupPlan


FEW_ENTRIES = 64  # tokens times experts of each
FEW = Plan(0, FewPlan(8, 512, 4, 4), DownPlan(2, 1))
SMALL = Plan(16, TilePlan(64, 128, 4, 4, swap=True), TilePlan(64, 128, 4, 4, swap=True))
MIDDLE = Plan(32, TilePlan(128, 128, 3, 4, swap=True), TilePlan(128, 128, 3, 4, swap=True))
LARGE = Plan(64, TilePlan(128, 64, 4, 4), TilePlan(128, 64, 4, 4))
LARGEST = Plan(128, TilePlan(256, 64, 3, 8), TilePlan(128, 64, 3, 8))
# Fetched: of weights as they are, and in fp8, where the tokens are so too.
FETCHED = Plan(128, FetchPlan(256, 64, 4, 8, streams=1), FetchPlan(128, 64, 3, 8, streams=2))
FETCHED_FP8 = Plan(128, FetchPlan(256, 128, 4, 8), FetchPlan(128, 128, 3, 8))
INVARIANT = LARGE  # a token's bits must not depend on how many there are


def find_plan(
    num_entries: int,
    num_experts: int,
    *,
    invariant: bool = False,
    can_fetch: bool = False,
    is_fp8: bool = False,
) -> Plan:
    """`num_entries`: tokens times the experts of each; `num_experts`: that they are spread over.
    `can_fetch`: `large.multiply_tiles` can be used."""
    if invariant:
        return INVARIANT
    if num_entries <= FEW_ENTRIES:
        return FEW
    each = num_entries / num_experts
    if each <= 8:
        return SMALL
    if each <= 24:
        return MIDDLE
    if each <= 96:
        return LARGE
    if not can_fetch:
        return LARGEST
    return FETCHED_FP8 if is_fp8 else FETCHED


def fit(plan: FewPlan, size: int) -> FewPlan:
    """With a block that divides `size`, if a large one does."""
    block = plan.block
    while block > 64 and size % block:
        block //= 2
    return plan if size % block else replace(plan, block=block)


def widen(plan: DownPlan, size: int) -> DownPlan:
    """With enough warps for `size` columns: what a thread holds of a row has to fit its registers."""
    warps = plan.warps
    while warps < 8 and size > 3 * 256 * warps:
        warps *= 2
    return replace(plan, warps=warps)
