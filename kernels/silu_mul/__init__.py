"""The gate of a SwiGLU block: silu(first half) * second half. Rows do not depend on each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernels.choice import (
    check_native_dtype,
    check_shape,
    check_triton_layout,
    refuse_implementation,
    require_library,
    require_triton,
)
from kernels.silu_mul import composed, native, reference

if TYPE_CHECKING:
    import torch

    from kernels.native_build import Library


class SiluMul(Protocol):
    def __call__(self, gate_up: torch.Tensor, /) -> torch.Tensor: ...


def select(implementation: str, library: Library | None = None) -> SiluMul:
    """The unchecked function, for the hot path."""
    match implementation:
        case "reference":
            return reference.silu_mul
        case "torch":
            return composed.silu_mul
        case "native":
            return native.bind(require_library(library))
        case "triton":
            require_triton()
            from kernels.silu_mul import triton

            return triton.bind()
    refuse_implementation(implementation)


def silu_mul(
    gate_up: torch.Tensor, *, implementation: str = "torch", library: Library | None = None
) -> torch.Tensor:
    """gate_up: [T, 2I], the gate first. Returns [T, I] in the same dtype."""
    check_shape("gate_up", gate_up, (None, None))
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must have an even number of columns, not {gate_up.shape[1]}")
    check_native_dtype(implementation, gate_up=gate_up)
    check_triton_layout(implementation, gate_up=gate_up)
    return select(implementation, library)(gate_up)
