"""Linears out of torch: oneDNN with the weight packed once, and torch's dynamic int8 linear.

torch's int8 differs from the reference in its activations: one scale and zero point for the whole
batch (asymmetric, 8 bit), so a row's result depends on the rows beside it.
"""

from __future__ import annotations

import warnings

import torch

from kernels.linear.reference import quantize_rows


class PackedLinear:
    """Owns one oneDNN-packed copy of the weight; the tensor passed in may be freed."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
    ) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise
        self._out_dtype = out_dtype
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._run(x, self._packed, self._bias, "none", [], "")
        return y if self._out_dtype is None else y.to(self._out_dtype)


class PlainLinear:
    """Keeps the weight as given, for the dtypes and CPUs that oneDNN does not pack."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
    ) -> None:
        self._weight, self._bias, self._out_dtype = weight, bias, out_dtype
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, self._weight, self._bias)
        return y if self._out_dtype is None else y.to(self._out_dtype)


class DynamicInt8Linear:
    """Owns torch's packed int8 weight; activations are quantized per batch at each call."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
    ) -> None:
        values, scales = quantize_rows(weight)
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():
            # Its quantized tensors are announced to go; this op still takes nothing else.
            warnings.filterwarnings("ignore", message=".*quantize_per_tensor.*deprecated")
            quantized = torch._make_per_channel_quantized_tensor(
                values, scales.double().clamp_min(1e-30), zeros, 0
            )
        self._packed = torch.ops.quantized.linear_prepack(
            quantized, None if bias is None else bias.float()
        )
        self._run = torch.ops.quantized.linear_dynamic
        self._out_dtype = out_dtype
        self.bytes = values.nbytes + scales.nbytes + (0 if bias is None else 4 * bias.numel())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._run(x.float(), self._packed)
        return y.to(self._out_dtype or x.dtype)


def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: str | None,
    out_dtype: torch.dtype | None,
) -> PackedLinear | PlainLinear | DynamicInt8Linear:
    if quantization == "int8":
        return DynamicInt8Linear(weight, bias, out_dtype)
    can_pack = torch._C._has_mkldnn and (
        weight.dtype == torch.float32
        or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        or (weight.dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported())
    )
    if can_pack:
        return PackedLinear(weight, bias, out_dtype)
    return PlainLinear(weight, bias, out_dtype)
