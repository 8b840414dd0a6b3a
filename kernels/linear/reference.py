"""y = x W^T + b in float32, rounded once; and what int8 means.

int8: weights per output channel, symmetric: sw[n] = max|W[n]| / 127, Wq[n] = round(W[n] / sw[n]).
Activations per token, symmetric, at run time: sx[t] = max|x[t]| / 127, xq[t] = round(x[t] / sx[t]).
y[t, n] = (sum_k xq[t, k] Wq[n, k]) * sx[t] * sw[n] + b[n], the sum exact in integers. Rounding is to
nearest, halves to even. A row of zeros has scale 0 and gives b.
"""

from __future__ import annotations

import torch


def quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """matrix: [R, K], any float type. Returns (int8 [R, K], float32 scales [R])."""
    wide = matrix.float()
    peak = wide.abs().amax(dim=1)
    inverse = torch.where(peak > 0, 127.0 / peak, 0.0)
    return (wide * inverse[:, None]).round_().to(torch.int8), peak / 127.0


class ReferenceLinear:
    """Keeps the weight as given, or its int8 form."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        quantization: str | None,
        out_dtype: torch.dtype | None,
    ) -> None:
        self._bias = None if bias is None else bias.float()
        self._out_dtype = out_dtype
        self._weight = weight
        self._scales: torch.Tensor | None = None
        if quantization == "int8":
            self._weight, self._scales = quantize_rows(weight)

    @property
    def bytes(self) -> int:
        scales = 0 if self._scales is None else self._scales.nbytes
        return self._weight.nbytes + scales + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._scales is None:
            y = x.float() @ self._weight.float().T
        else:
            xq, sx = quantize_rows(x)
            # float64 holds sums of int8 products exactly
            y = (xq.double() @ self._weight.double().T).float() * sx[:, None] * self._scales
        if self._bias is not None:
            y = y + self._bias
        return y.to(self._out_dtype or x.dtype)
