"""The two kernels that read a stored weight, launched by a plan; and how a plan cuts a product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.launch import Launcher
from kernels.linear import plans
from kernels.linear.stream import stream_rows
from kernels.linear.tiles import tile_rows

Norm = tuple[torch.Tensor, float]  # weight [K] and eps
SMALLEST_ROWS = SMALLEST_TOKENS = 16  # of a tile
ALIGNED = 16  # elements of a row that every kernel reads at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a kernel does besides the product. Before it: `norm`, of a stream only, or `x_scale` [M], of
    quantized tokens. Behind it the gate (channels 2i and 2i + 1 are gate and up of channel i), or the
    residual [M, N] is added."""

    norm: Norm | None = None
    x_scale: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A weight as the kernels read it: [N, K], and what its rows are multiplied with and moved by."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None  # [N] float32
    bias: torch.Tensor | None = None  # [N]

    @property
    def bytes(self) -> int:
        held = (self.weight, self.scale, self.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)


def tile_counters(num_rows: int, device: torch.device) -> torch.Tensor:
    """Zeros, one for each tile of the lowest: how many of its pieces are done, zero again behind a
    launch."""
    return torch.zeros(-(-num_rows // SMALLEST_ROWS), dtype=torch.int32, device=device)


class Cut(NamedTuple):
    """How a plan divides a product. `tokens` of a tile; `parts` [tiles, splits, rows, tokens] float32:
    room for sums that several programs share, None where each has a tile of its own."""

    tokens: int
    grid: tuple[int, int, int]
    parts: torch.Tensor | None


def cut_tiles(plan: plans.TilePlan, num_rows: int, x: torch.Tensor) -> Cut:
    """x: [M, K], which a weight of [num_rows, K] is multiplied with."""
    tokens = plan.tokens or max(plans.token_tile(x.shape[0]), SMALLEST_TOKENS)
    grid = (-(-x.shape[0] // tokens), -(-num_rows // plan.rows), plan.splits)
    parts = None
    if plan.splits > 1:
        parts = x.new_empty((math.prod(grid), plan.rows, tokens), dtype=torch.float32)
    return Cut(tokens, grid, parts)


class Kernels:
    """Both kernels, compiled as they are asked for. One call at a time: they count done pieces."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._stream, self._tile = Launcher(stream_rows), Launcher(tile_rows)
        self._done = tile_counters(num_rows, device)

    def run(
        self, stored: Stored, x: torch.Tensor, out: torch.Tensor, extras: Extras, plan: plans.Plan
    ) -> None:
        """x: [M, K]; out: [M, N], or [M, N / 2] if gated."""
        if isinstance(plan, plans.StreamPlan):
            self._run_stream(stored, x, out, extras, plan)
        else:
            self._run_tile(stored, x, out, extras, plan)

    def _run_stream(
        self,
        stored: Stored,
        x: torch.Tensor,
        out: torch.Tensor,
        extras: Extras,
        plan: plans.StreamPlan,
    ) -> None:
        num_rows, size = stored.weight.shape
        norm, eps = extras.norm or (None, 0.0)
        is_even = num_rows % plan.rows == 0 and size % plan.block == 0
        wave = 0 if size % ALIGNED or not plan.prefetch else plan.wave
        tokens = x.shape[0]
        shape = (plans.token_tile(tokens), plan.rows, plan.block, plan.stages)
        self._stream(
            (-(-num_rows // plan.rows), 1, 1),
            (x, norm, stored.weight, stored.scale, stored.bias, extras.residual, out),
            (tokens, num_rows, min(plan.prefetch, size), wave, eps),
            (size, *shape, is_even, plan.late, extras.gated),
            num_warps=plan.warps,
        )

    def _run_tile(
        self,
        stored: Stored,
        x: torch.Tensor,
        out: torch.Tensor,
        extras: Extras,
        plan: plans.TilePlan,
    ) -> None:
        num_rows, size = stored.weight.shape
        cut = cut_tiles(plan, num_rows, x)
        is_even = num_rows % plan.rows == 0 and size % (plan.splits * plan.pieces * plan.block) == 0
        wave = plan.wave if is_even and plan.prefetch else 0
        shape = (cut.tokens, plan.rows, plan.block, plan.stages, plan.splits, plan.pieces)
        tensors = (
            *(x, extras.x_scale, stored.weight, stored.scale, stored.bias),
            *(extras.residual, out, cut.parts, self._done),
        )
        self._tile(
            cut.grid,
            tensors,
            (x.shape[0], num_rows, min(plan.prefetch, size // plan.splits), wave),
            (size, *shape, is_even, not x.is_cuda, extras.gated),
            num_warps=plan.warps,
        )
