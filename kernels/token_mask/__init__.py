"""Forbids tokens: where a packed mask has no bit, a logit becomes minus infinity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernels.choice import check_dtype, check_shape, refuse_implementation, require_triton

if TYPE_CHECKING:
    import torch


class Forbid(Protocol):
    def __call__(
        self, logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, /
    ) -> None: ...


def select(implementation: str) -> Forbid:
    """The unchecked function: "reference", any device; "torch", a CPU; "triton"."""
    match implementation:
        case "reference":
            from kernels.token_mask import reference

            return reference.forbid
        case "torch":
            from kernels.token_mask import composed

            return composed.forbid
        case "triton":
            require_triton()
            from kernels.token_mask import triton

            return triton.bind()
    refuse_implementation(implementation)


def forbid(
    logits: torch.Tensor,
    places: torch.Tensor,
    masks: torch.Tensor,
    *,
    implementation: str = "reference",
) -> None:
    """Changes the P lines `places` [P] int64 of logits [S, V] float32 in place. masks: [P, bytes] uint8;
    bit `t % 8` of byte `t // 8` stands for token t."""
    import torch

    check_shape("masks", masks, (len(places), -(-logits.shape[1] // 8)))
    check_dtype("masks", masks, torch.uint8)
    check_dtype("places", places, torch.int64)
    check_dtype("logits", logits, torch.float32)
    if not logits.is_contiguous() or not masks.is_contiguous():
        raise ValueError("logits and masks must be contiguous")
    select(implementation)(logits, places, masks)
