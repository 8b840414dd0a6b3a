"""Two attentions of the same queries over disjoint keys, made into the one over all those keys."""

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
from kernels.merge_state import reference


class MergeState(Protocol):
    def __call__(
        self,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def select(implementation: str) -> MergeState:
    """The unchecked function, for the hot path."""
    match implementation:
        case "triton":
            require_triton()
            from kernels.merge_state import triton

            return triton.bind()
        case "reference" | "torch" | "native":
            return reference.merge_state
    refuse_implementation(implementation)


def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    implementation: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """out_a, out_b: [T, heads, dim], each normalized by itself; lse_a, lse_b: [T, heads] float32, the
    natural logarithm of the sum of the exponentials of its scores. Returns (out in out_a's dtype, lse).

    An lse of -inf says that there were no keys: that side's out is not looked at, and where both sides
    say it the result is 0 with -inf.
    """
    check_shape("out_a", out_a, (None, None, None))
    check_shape("out_b", out_b, tuple(out_a.shape))
    check_dtype("out_b", out_b, out_a.dtype)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_shape(name, lse, tuple(out_a.shape[:2]))
        check_dtype(name, lse, torch.float32)
    check_triton_layout(implementation, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    return select(implementation)(out_a, lse_a, out_b, lse_b)
