"""fp8 weights on the GPU. One token reads them as they are, with activations in bfloat16; more tokens
have their activations quantized too, a scale for each token, and use the fp8 tensor cores."""

from __future__ import annotations

import torch

from kernels.launch import shared_memory
from kernels.linear import plans, quantize
from kernels.linear.gate import bind as bind_gate
from kernels.linear.launches import Extras, Kernels, Norm, Stored
from kernels.linear.quantized import Fp8Weight


class Fp8Linear:
    """A `kernels.linear.FusedLinear`."""

    def __init__(
        self,
        weight: Fp8Weight,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        *,
        gated: bool = False,
        invariant: bool = False,
    ) -> None:
        self._stored = Stored(weight=weight.values, scale=weight.scales, bias=bias)
        self._dtype, self._out_dtype = weight.dtype, out_dtype or weight.dtype
        self._gated = gated
        num_rows, size = weight.shape
        self._channels = num_rows // 2 if gated else num_rows
        self._kernels = Kernels(num_rows, weight.values.device)
        self._quantize, self._silu_mul = quantize.bind(), bind_gate()
        room = shared_memory(weight.device)
        self._plans = plans.Plans(num_rows, size, kind="fp8", invariant=invariant, room=room)
        self.bytes = self._stored.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, None, None)

    def pays(self, num_tokens: int) -> bool:
        """Norms and sums ride on the passes that a quantized product takes anyway."""
        return True

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._run(x, (weight, eps), None)

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._run(x, None, residual)

    def _run(
        self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        plan = self._plans.find(x.shape[0])
        if plan is None:
            return self._many(x, norm, residual)
        out = residual
        if out is None:
            out = x.new_empty((x.shape[0], self._channels), dtype=self._out_dtype)
        extras = Extras(norm=norm, residual=residual, gated=self._gated)
        if isinstance(plan, plans.TilePlan):
            x, scales = self._quantize(x, norm)
            extras = Extras(x_scale=scales, residual=residual, gated=self._gated)
        self._kernels.run(self._stored, x, out, extras, plan)
        return out

    def _many(
        self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        values, scales = self._quantize(x, norm)
        y = multiply(values, scales, self._stored, self._dtype)
        if self._gated:
            return self._silu_mul(y)
        return y.to(self._out_dtype) if residual is None else residual.add_(y)


def multiply(
    values: torch.Tensor, scales: torch.Tensor, stored: Stored, dtype: torch.dtype
) -> torch.Tensor:
    """[M, K] times [N, K], each row with its scale, by the vendor's library: [M, N] in `dtype`."""
    weight, scale, bias = stored.weight, stored.scale, stored.bias
    assert scale is not None
    if values.is_cuda:
        y = torch._scaled_mm(
            values,
            weight.t(),
            scale_a=scales[:, None],
            scale_b=scale[None, :],
            out_dtype=dtype,
            use_fast_accum=True,
        )
    else:
        y = (values.float() @ weight.float().t() * scales[:, None] * scale).to(dtype)
    return y if bias is None else y.add_(bias)
