"""The rows of a matrix for some token ids."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.choice import (
    check_dtype,
    check_shape,
    check_triton_layout,
    refuse_implementation,
    require_triton,
)
from kernels.embedding import reference


class Embed(Protocol):
    def __call__(self, token_ids: torch.Tensor, weight: torch.Tensor, /) -> torch.Tensor: ...


def select(implementation: str) -> Embed:
    """The unchecked function, for the hot path."""
    match implementation:
        case "triton":
            require_triton()
            from kernels.embedding import triton

            return triton.bind()
        case "reference" | "torch" | "native":
            return reference.embed
    refuse_implementation(implementation)


def embed(
    token_ids: torch.Tensor, weight: torch.Tensor, *, implementation: str = "torch"
) -> torch.Tensor:
    """token_ids: [T] int64, trusted to be in range; weight: [V, H]. Returns [T, H] in weight's dtype."""
    check_shape("token_ids", token_ids, (None,))
    check_dtype("token_ids", token_ids, torch.int64)
    check_shape("weight", weight, (None, None))
    check_triton_layout(implementation, token_ids=token_ids, weight=weight)
    return select(implementation)(token_ids, weight)
