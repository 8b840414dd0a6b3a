"""The weights of many experts in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear.quantized import Fp8Weight, QuantizedWeight, quantize_fp8

QUANTIZATIONS = (None, "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """values: [E, N, K], scales: [E, N] float32 or None; what is meant is their product."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def of(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """[N, K]"""
        if self.scales is None:
            return self.values[expert]
        return (self.values[expert].float() * self.scales[expert][:, None]).to(dtype)


def stack(
    weight: torch.Tensor | QuantizedWeight, num_experts: int, quantization: str | None = None
) -> Stacked:
    """weight: [E N, K], expert after expert, in fp8 already perhaps; it is not copied unless it is
    quantized."""
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r} is not for experts; allowed: None, fp8")
    if num_experts < 1 or weight.shape[0] % num_experts:
        raise ValueError(f"{weight.shape[0]} rows are not those of {num_experts} experts")
    shape = (num_experts, weight.shape[0] // num_experts, weight.shape[1])
    if isinstance(weight, torch.Tensor) and quantization is None:
        return Stacked(values=weight.view(shape))
    packed = quantize_fp8(weight) if isinstance(weight, torch.Tensor) else weight
    if not isinstance(packed, Fp8Weight) or packed is weight and quantization is not None:
        raise ValueError("of weights that are quantized already experts take fp8 only, as they are")
    return Stacked(values=packed.values.view(shape), scales=packed.scales.view(shape[:2]))
