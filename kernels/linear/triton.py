# mypy: disable-error-code="no-untyped-call"
"""Linears on the GPU: own kernels while the weight's bytes are what counts, cuBLAS beyond.

The weight stays [N, K], row by row, in bfloat16, float16 or float32. Results are summed in float32 and
rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.launch import Launcher
from kernels.linear import plans
from kernels.linear.gate import bind as bind_gate
from kernels.linear.gate import interleave
from kernels.linear.stream import stream_rows
from kernels.linear.tiles import tile_rows
from kernels.rms_norm.triton import bind as bind_norms

ALIGNED = 16  # elements of a row that every kernel reads at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a kernel does besides the product. `norm`: [K] weight and eps, before it; behind it the gate
    (channels 2i and 2i + 1 are gate and up of channel i), or the residual [M, N] is added."""

    norm: tuple[torch.Tensor, float] | None = None
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


class Kernels:
    """Both kernels, compiled as they are asked for."""

    def __init__(self) -> None:
        self._stream, self._tile = Launcher(stream_rows), Launcher(tile_rows)

    def stream(
        self,
        stored: Stored,
        x: torch.Tensor,
        out: torch.Tensor,
        extras: Extras,
        plan: plans.StreamPlan,
    ) -> None:
        """x: [1, K]."""
        num_rows, size = stored.weight.shape
        norm, eps = extras.norm or (None, 0.0)
        is_even = num_rows % plan.rows == 0 and size % plan.block == 0
        prefetch = 0 if size % ALIGNED else min(plan.prefetch, size)
        shape = (plan.rows, plan.block, plan.stages)
        self._stream(
            (-(-num_rows // plan.rows), 1, 1),
            (x, norm, stored.weight, stored.scale, stored.bias, extras.residual, out),
            (num_rows, eps),
            (size, *shape, is_even, prefetch, plan.wave, extras.gated),
            num_warps=plan.warps,
        )

    def tile(
        self,
        stored: Stored,
        x: torch.Tensor,
        out: torch.Tensor,
        extras: Extras,
        plan: plans.TilePlan,
        done: torch.Tensor,
    ) -> None:
        """x: [M, K]; `done`: zeros, one for each tile."""
        (num_rows, size), tokens = stored.weight.shape, plans.token_tile(x.shape[0])
        grid = (-(-x.shape[0] // tokens), -(-num_rows // plan.rows), plan.splits)
        parts = None
        if plan.splits > 1:
            parts = x.new_empty((math.prod(grid), plan.rows, tokens), dtype=torch.float32)
        is_even = num_rows % plan.rows == 0 and size % (plan.splits * plan.block) == 0
        most = -(-size // (plan.splits * plan.block)) * plan.block
        prefetch = 0 if size % (plan.splits * ALIGNED) else min(plan.prefetch, most)
        shape = (tokens, plan.rows, plan.block, plan.stages, plan.splits)
        self._tile(
            grid,
            (x, stored.weight, stored.scale, stored.bias, extras.residual, out, parts, done),
            (x.shape[0], num_rows),
            (size, *shape, is_even, not x.is_cuda, prefetch, plan.wave, extras.gated),
            num_warps=plan.warps,
        )


class TritonLinear:
    """A `kernels.linear.FusedLinear` over a stored weight; `many` is its product for many tokens,
    without the gate."""

    def __init__(
        self, stored: Stored, out_dtype: torch.dtype, many: Many, *, gated: bool = False
    ) -> None:
        self._stored, self._out_dtype, self._many, self._gated = stored, out_dtype, many, gated
        num_rows, size = stored.weight.shape
        self._kernels = Kernels()
        self._rms_norm = bind_norms().rms_norm
        self._silu_mul = bind_gate()
        self._channels = num_rows // 2 if gated else num_rows
        is_wide = stored.weight.dtype == torch.float32  # the tensor cores would round it
        self._stream = plans.stream_plan(num_rows, size)
        self._tiles = {
            tokens: None if is_wide else plans.tile_plan(num_rows, size, tokens)
            for tokens in plans.TOKEN_TILES
        }
        self._done = stored.weight.new_zeros(-(-num_rows // 16), dtype=torch.int32)
        self.bytes = stored.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, Extras(gated=self._gated))

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.shape[0] == 1:
            return self._run(x, Extras(norm=(weight, eps), gated=self._gated))
        return self(self._rms_norm(x, weight, eps))

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._run(x, Extras(residual=residual))

    def _run(self, x: torch.Tensor, extras: Extras) -> torch.Tensor:
        tokens = x.shape[0]
        plan = self._tiles.get(plans.token_tile(tokens)) if tokens <= plans.LARGEST_TILE else None
        if tokens != 1 and plan is None:
            return self._large(x, extras.residual)
        out = extras.residual
        if out is None:
            out = x.new_empty((tokens, self._channels), dtype=self._out_dtype)
        if tokens == 1:
            self._kernels.stream(self._stored, x, out, extras, self._stream)
        elif plan is not None:
            self._kernels.tile(self._stored, x, out, extras, plan, self._done)
        return out

    def _large(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        y = self._many(x, residual)
        return self._silu_mul(y) if self._gated else y


class Many(Protocol):
    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, /) -> torch.Tensor:
        """x: [M, K] -> [M, N]. A residual [M, N] is added; it may be written over."""
        ...


@dataclass(frozen=True, slots=True)
class Library:
    """torch's product. float32 sums are kept where the result is wider than x."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_dtype: torch.dtype

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if self.out_dtype != x.dtype:
            if x.is_cuda:
                y = torch.mm(x, weight.t(), out_dtype=self.out_dtype)
            else:
                y = x.to(self.out_dtype) @ weight.to(self.out_dtype).t()
            y = y if bias is None else y.add_(bias)
        elif residual is not None and bias is None:
            return residual.addmm_(x, weight.t())
        else:
            y = F.linear(x, weight, bias)
        return y if residual is None else residual.add_(y)


def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: str | None,
    out_dtype: torch.dtype | None,
    *,
    gated: bool = False,
) -> TritonLinear:
    if quantization is not None:
        raise ValueError(f"quantization {quantization!r} is not one of the GPU's")
    if gated:
        weight, bias = interleave(weight), None if bias is None else interleave(bias)
    weight = weight.contiguous()
    wide = out_dtype or weight.dtype
    stored = Stored(weight=weight, bias=bias)
    return TritonLinear(stored, wide, Library(weight, bias, wide), gated=gated)
