"""int4 weights on the GPU: few tokens multiply them as they are, many by way of pieces in bfloat16."""

from __future__ import annotations

import torch

from kernels.launch import Launcher, shared_memory
from kernels.linear import plans
from kernels.linear.gate import bind as bind_gate
from kernels.linear.int4_kernels import expand_rows, int4_rows
from kernels.linear.launches import cut_tiles, tile_counters
from kernels.linear.quantized import Int4Weight, half_unit
from kernels.rms_norm.triton import bind as bind_norms

PIECE_BYTES = 128 << 20  # of a weight that is expanded for many tokens


class Int4Linear:
    """A `kernels.linear.FusedLinear`. Activations stay in their type."""

    def __init__(
        self,
        weight: Int4Weight,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        *,
        gated: bool = False,
        invariant: bool = False,
    ) -> None:
        self._weight, self._bias, self._gated = weight, bias, gated
        self._out_dtype = out_dtype or weight.dtype
        num_rows, self._size = weight.shape
        self._num_rows = num_rows
        self._channels = num_rows // 2 if gated else num_rows
        room = shared_memory(weight.device)
        self._plans = plans.Plans(num_rows, self._size, kind="int4", invariant=invariant, room=room)
        self._done = tile_counters(num_rows, weight.device)
        self._launch, self._expand = Launcher(int4_rows), Launcher(expand_rows)
        self._rms_norm, self._silu_mul = bind_norms().rms_norm, bind_gate()
        self.bytes = weight.bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, None)

    def pays(self, num_tokens: int) -> bool:
        """Norms and sums ride on the passes that a quantized product takes anyway."""
        return True

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self(self._rms_norm(x, weight, eps))

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._run(x, residual)

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        plan = self._plans.find(x.shape[0])
        if plan is None:
            return self._many(x, residual)
        assert isinstance(plan, plans.TilePlan)
        return self.run(x, residual, plan)

    def run(
        self, x: torch.Tensor, residual: torch.Tensor | None, plan: plans.TilePlan
    ) -> torch.Tensor:
        """By the plan, whatever the number of tokens."""
        weight, tokens = self._weight, x.shape[0]
        out = residual
        if out is None:
            out = x.new_empty((tokens, self._channels), dtype=self._out_dtype)
        cut, half = cut_tiles(plan, self._num_rows, x), half_unit(weight.group)
        tensors = (
            *(x, weight.values, weight.scales, weight.zeros, self._bias),
            *(residual, out, cut.parts, self._done),
        )
        shape = (self._size, weight.group, half, cut.tokens, plan.rows, plan.stages)
        self._launch(
            cut.grid,
            tensors,
            (tokens, self._num_rows),
            (*shape, plan.splits, plan.pieces, not x.is_cuda, self._gated),
            num_warps=plan.warps,
        )
        return out

    def _many(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty((x.shape[0], self._num_rows))
        height = max(16, PIECE_BYTES // (self._size * x.element_size()))
        for first in range(0, self._num_rows, height):
            last = min(first + height, self._num_rows)
            torch.mm(x, self._rows(first, last, x).t(), out=out[:, first:last])
        if self._bias is not None:
            out += self._bias
        if self._gated:
            return self._silu_mul(out)
        return out.to(self._out_dtype) if residual is None else residual.add_(out)

    def _rows(self, first: int, last: int, x: torch.Tensor) -> torch.Tensor:
        weight, half = self._weight, half_unit(self._weight.group)
        expanded = x.new_empty((last - first, self._size))
        self._expand(
            (last - first, self._size // (2 * half), 1),
            (weight.values, weight.scales, weight.zeros, expanded),
            (first,),
            (self._size, weight.group, half),
            num_warps=1,
        )
        return expanded
