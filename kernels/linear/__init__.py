"""x W^T + b with the weight packed once into the layout its implementation reads fastest.

A packed linear holds ONE copy of the weight and nothing of the tensor it was made from (except
`reference`, and `torch` where oneDNN cannot pack, which keep that very tensor). It offers no rows
back: with a tied embedding, keep the original matrix for the row gather beside the packed head.
int8 weights and activations: the formula stands in `reference.py`; fp8 and int4 weights: `quantized.py`.
Where a CPU computes, these two are turned back into the dtype of the activations when packed.
Rows: in `native` and `reference` a row's result does not depend on the other rows of the batch; in
`triton` if that is asked for when packing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from kernels.choice import (
    check_native_dtype,
    check_shape,
    check_triton_layout,
    refuse_implementation,
    require_library,
    require_triton,
)
from kernels.linear import composed, native
from kernels.linear.quantized import QuantizedWeight as QuantizedWeight
from kernels.linear.quantized import quantize_fp8, quantize_int4
from kernels.linear.reference import ReferenceLinear

if TYPE_CHECKING:
    from kernels.native_build import Library

QUANTIZATIONS: tuple[str | None, ...] = (None, "int8", "fp8", "int4")
QUANTIZERS: dict[str | None, Callable[[torch.Tensor], QuantizedWeight]] = {
    "fp8": quantize_fp8,
    "int4": quantize_int4,
}


class Linear(Protocol):
    @property
    def bytes(self) -> int:
        """What the packed form holds: weight, scales and bias."""
        ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """x: [T, K] in the weight's dtype, contiguous. Returns [T, N]. Unchecked."""
        ...


@runtime_checkable
class AddingLinear(Linear, Protocol):
    """One that takes in the sum behind it."""

    def added(self, x: torch.Tensor, residual: torch.Tensor, /) -> torch.Tensor:
        """residual + self(x). residual: [T, N], contiguous; it is written, and what is returned may be
        it. Not for a gated linear, nor for one with an `out_dtype`."""
        ...


@runtime_checkable
class FusedLinear(AddingLinear, Protocol):
    """What the linears of implementation "triton" also do, in the same launch while tokens are few. The
    results are those of the ops one after the other, up to the rounding of what no longer is stored."""

    def pays(self, num_tokens: int) -> bool:
        """Whether the fused forms cost so many tokens less than separate ones. Where nothing may depend
        on the number of tokens, it says the same for all."""
        ...

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor:
        """self(rms_norm(x, weight, eps)). x: [T, K]; weight: [K]."""
        ...


def pack_linear(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    quantization: str | None = None,
    out_dtype: torch.dtype | None = None,
    gated: bool = False,
    invariant: bool = False,
    implementation: str = "torch",
    library: Library | None = None,
) -> Linear:
    """weight: [N, K], or one that is quantized already; bias: [N]. `out_dtype`: float32 for logits, say;
    default: x's dtype.

    `gated`, for "triton" only: the rows are N / 2 gates and then as many ups, and the linear returns
    silu(gate) * up, [T, N / 2]; "triton" gives a `FusedLinear`. `invariant`: there, too, a token's
    result must not depend, to the bit, on the tokens beside it.
    """
    if isinstance(weight, torch.Tensor):
        check_shape("weight", weight, (None, None))
    elif quantization is not None:
        raise ValueError(f"quantization {quantization!r} of a weight that is quantized already")
    if bias is not None:
        check_shape("bias", bias, (weight.shape[0],))
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {QUANTIZATIONS}, not {quantization!r}")
    if gated and implementation != "triton":
        raise ValueError(f"gated is for implementation 'triton', not {implementation!r}")
    if isinstance(weight, torch.Tensor) and quantization in QUANTIZERS:
        weight, quantization = QUANTIZERS[quantization](weight), None
    if not isinstance(weight, torch.Tensor) and implementation != "triton":
        exact = torch.float32 if implementation == "reference" else weight.dtype
        weight = weight.dequantize(exact)
    match implementation:
        case "reference":
            assert isinstance(weight, torch.Tensor)
            return ReferenceLinear(weight, bias, quantization, out_dtype)
        case "torch":
            assert isinstance(weight, torch.Tensor)
            return composed.pack(weight, bias, quantization, out_dtype)
        case "native":
            assert isinstance(weight, torch.Tensor)
            check_native_dtype(implementation, weight=weight)
            return native.pack(weight, bias, quantization, out_dtype, require_library(library))
        case "triton":
            require_triton()
            from kernels.linear import triton

            if quantization is not None:
                raise ValueError(
                    f"quantization {quantization!r} is not the GPU's; allowed: fp8, int4"
                )
            if isinstance(weight, torch.Tensor):
                check_triton_layout(implementation, weight=weight)
            return triton.pack(weight, bias, out_dtype, gated=gated, invariant=invariant)
    refuse_implementation(implementation)
