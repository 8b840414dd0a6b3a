"""y = x W^T + b in float32, rounded once; and what int8 means.

int8, for a row r of the weight (an output channel, while packing) or of x (a token, at run time):
scale s(r) = max|r| / 127, values q(r) = round(r * (127 / max|r|)). Symmetric; no zero point.
y[t, n] = (q(x[t]) . q(W[n])) * s(x[t]) * s(W[n]) + b[n], the product exact in integers. Rounding is to
nearest, halves to even. A row of zeros has scale 0 and gives b.
"""

from __future__ import annotations

import torch


def quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """matrix: [R, K], any float type. Returns (int8 [R, K], float32 scales [R])."""
    wide = matrix.float()
    peak = wide.abs().amax(dim=1)
    # A true division: `127.0 / peak` would be the rounded reciprocal times 127.
    inverse = torch.where(peak > 0, torch.full_like(peak, 127.0) / peak, 0.0)
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
