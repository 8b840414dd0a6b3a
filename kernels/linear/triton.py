"""Linears on the GPU: own kernels while the weight's bytes are what counts, a library beyond.

The weight stays [N, K], row by row; what it is stored in decides the file: this one has bfloat16,
float16 and float32, `fp8.py` and `int4.py` the others. Results are summed in float32 and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kernels.launch import shared_memory
from kernels.linear import plans
from kernels.linear.fp8 import Fp8Linear
from kernels.linear.gate import bind as bind_gate
from kernels.linear.gate import pair_rows
from kernels.linear.int4 import Int4Linear
from kernels.linear.launches import Extras, Kernels, Stored
from kernels.linear.quantized import Fp8Weight, Int4Weight, QuantizedWeight
from kernels.rms_norm.triton import bind as bind_norms

if TYPE_CHECKING:
    from kernels.linear import FusedLinear


class PlainLinear:
    """A `kernels.linear.FusedLinear`. Keeps the weight as given."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        *,
        gated: bool = False,
        invariant: bool = False,
    ) -> None:
        self._stored, self._gated = Stored(weight=weight, bias=bias), gated
        self._out_dtype = out_dtype or weight.dtype
        num_rows, size = weight.shape
        self._channels = num_rows // 2 if gated else num_rows
        self._kernels = Kernels(num_rows, weight.device)
        self._rms_norm, self._silu_mul = bind_norms().rms_norm, bind_gate()
        self._plans = plans.Plans(
            num_rows,
            size,
            # float32: the library's are as fast as ours, which take no tensor cores for it
            kind="library" if weight.dtype == torch.float32 else "plain",
            invariant=invariant,
            room=shared_memory(weight.device),
        )
        self.bytes = self._stored.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, Extras(gated=self._gated))

    def pays(self, num_tokens: int) -> bool:
        """A library's product is slowed by a residual more than a sum of its own takes."""
        return self._plans.find(num_tokens) is not None

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if isinstance(self._plans.find(x.shape[0]), plans.StreamPlan):
            return self._run(x, Extras(norm=(weight, eps), gated=self._gated))
        return self(self._rms_norm(x, weight, eps))

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._run(x, Extras(residual=residual))

    def _run(self, x: torch.Tensor, extras: Extras) -> torch.Tensor:
        plan = self._plans.find(x.shape[0])
        if plan is None:
            y = multiply(x, self._stored, extras.residual, self._out_dtype)
            return self._silu_mul(y) if self._gated else y
        out = extras.residual
        if out is None:
            out = x.new_empty((x.shape[0], self._channels), dtype=self._out_dtype)
        self._kernels.run(self._stored, x, out, extras, plan)
        return out


def multiply(
    x: torch.Tensor, stored: Stored, residual: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """torch's product, [M, N]; float32 sums are kept where the result is wider than x. A residual is
    added and written over."""
    weight, bias = stored.weight, stored.bias
    if out_dtype != x.dtype:
        if x.is_cuda:
            y = torch.mm(x, weight.t(), out_dtype=out_dtype)
        else:
            y = x.to(out_dtype) @ weight.to(out_dtype).t()
        return y if bias is None else y.add_(bias)
    if residual is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return residual.addmm_(x, weight.t())
    return residual.add_(F.linear(x, weight, bias))


def pack(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    *,
    gated: bool = False,
    invariant: bool = False,
) -> FusedLinear:
    if gated:
        order = pair_rows(weight.shape[0], weight.device)
        weight = weight[order] if isinstance(weight, torch.Tensor) else weight.select_rows(order)
        bias = None if bias is None else bias[order]
    if isinstance(weight, Fp8Weight):
        return Fp8Linear(weight, bias, out_dtype, gated=gated, invariant=invariant)
    if isinstance(weight, Int4Weight):
        return Int4Linear(weight, bias, out_dtype, gated=gated, invariant=invariant)
    return PlainLinear(weight, bias, out_dtype, gated=gated, invariant=invariant)
