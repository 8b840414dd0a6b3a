"""The likeliest token of each row: the largest logit, and of equal ones the lowest id. Rows do not
depend on each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernels.best_token import composed, native, reference
from kernels.choice import check_shape, refuse_implementation, require_library

if TYPE_CHECKING:
    import torch

    from kernels.native_build import Library


class BestToken(Protocol):
    def __call__(self, logits: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]: ...


def select(implementation: str, library: Library | None = None) -> BestToken:
    """The unchecked function, for the hot path."""
    match implementation:
        case "reference":
            return reference.best_token
        case "torch" | "triton":  # torch's reductions are the GPU's kernels here
            return composed.best_token
        case "native":
            return native.bind(require_library(library))
    refuse_implementation(implementation)


def best_token(
    logits: torch.Tensor, *, implementation: str = "torch", library: Library | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [S, V], V at least 1. Returns the values [S] in the same dtype and the places [S] int64.
    A row with a NaN has the value NaN, and a place that means nothing. Native: float32, a row's values
    next to each other."""
    check_shape("logits", logits, (None, None))
    if logits.shape[1] == 0:
        raise ValueError("logits must have at least one column")
    if implementation == "native" and (
        str(logits.dtype) != "torch.float32" or logits.stride(1) != 1
    ):
        raise ValueError("native best_token reads float32 logits whose rows are contiguous")
    return select(implementation, library)(logits)
