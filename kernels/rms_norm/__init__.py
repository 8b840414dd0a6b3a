"""RMS norm of rows, alone and with the residual addition that comes before it.

A row's result does not depend on the other rows, in any implementation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kernels.choice import (
    check_native_dtype,
    check_shape,
    check_triton_layout,
    refuse_implementation,
    require_library,
    require_triton,
)
from kernels.rms_norm import composed, native, reference

if TYPE_CHECKING:
    import torch

    from kernels.native_build import Library


class RMSNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor: ...


class AddRMSNorm(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, /
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Norms(NamedTuple):
    rms_norm: RMSNorm
    add_rms_norm: AddRMSNorm


def select(implementation: str, library: Library | None = None) -> Norms:
    """The unchecked functions, for the hot path."""
    match implementation:
        case "reference":
            return Norms(reference.rms_norm, reference.add_rms_norm)
        case "torch":
            return Norms(composed.rms_norm, composed.add_rms_norm)
        case "native":
            return native.bind(require_library(library))
        case "triton":
            require_triton()
            from kernels.rms_norm import triton

            return triton.bind()
    refuse_implementation(implementation)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    implementation: str = "torch",
    library: Library | None = None,
) -> torch.Tensor:
    """x: [T, H]; weight: [H]. Returns [T, H] in x's dtype."""
    check_shape("x", x, (None, None))
    check_shape("weight", weight, (x.shape[1],))
    check_native_dtype(implementation, x=x, weight=weight)
    check_triton_layout(implementation, x=x, weight=weight)
    return select(implementation, library).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    implementation: str = "torch",
    library: Library | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual: [T, H]; weight: [H]. Returns (norm of x + residual, x + residual).

    The sum is rounded to x's dtype before the norm reads it. It may be written into `residual`:
    use the returned tensor and forget the one passed in.
    """
    check_shape("x", x, (None, None))
    check_shape("residual", residual, tuple(x.shape))
    check_shape("weight", weight, (x.shape[1],))
    check_native_dtype(implementation, x=x, residual=residual, weight=weight)
    check_triton_layout(implementation, x=x, residual=residual, weight=weight)
    return select(implementation, library).add_rms_norm(x, residual, weight, eps)
