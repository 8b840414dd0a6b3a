"""What MLA does between its first products and its attention: the norm of the latent, the rotation of
the shared key and of every head's rotated part, and the write into the pool.

A token's result does not depend on the others.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.choice import check_dtype, check_shape, refuse_implementation, require_triton
from kernels.latent_write import reference


class WriteLatent(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        norm: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        plane: torch.Tensor,
        eps: float,
        interleaved: bool,
    ) -> None: ...


def select(implementation: str) -> WriteLatent:
    """The unchecked function, for the hot path."""
    match implementation:
        case "triton":
            require_triton()
            from kernels.latent_write import triton

            return triton.bind()
        case "reference" | "torch" | "native":
            return reference.write_latent
    refuse_implementation(implementation)


def write_latent(
    q: torch.Tensor,
    latents: torch.Tensor,
    norm: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    plane: torch.Tensor,
    eps: float,
    interleaved: bool,
    *,
    implementation: str = "torch",
) -> None:
    """q: [T, heads, nope + rope], tokens any stride apart: its last `rope` channels are rotated in
    place. latents: [T, rank + rope], tokens any stride apart: normed and rotated, they go to `slots` of
    the plane.

    norm: [rank]. positions, slots: [T] int64. cos_sin: [context, rope] float32, the cosines of the
    rope/2 angles, then their sines. plane: [num_slots, 1, rank + rope]; slots must differ but for
    padding. `interleaved`: channels 2 i and 2 i + 1 rotate together, and are left as i and i + rope/2;
    else i and i + rope/2 do. Positions and slots are trusted to be in range.
    """
    tokens, rank, rope = len(q), len(norm), cos_sin.shape[1]
    check_shape("q", q, (None, None, None))
    check_shape("latents", latents, (tokens, rank + rope))
    check_shape("norm", norm, (None,))
    check_shape("positions", positions, (tokens,))
    check_shape("slots", slots, (tokens,))
    check_shape("plane", plane, (None, 1, rank + rope))
    check_dtype("positions", positions, torch.int64)
    check_dtype("slots", slots, torch.int64)
    check_dtype("cos_sin", cos_sin, torch.float32)
    if rope % 2 or rope > q.shape[2]:
        raise ValueError(f"rope must be even and no more than a query's {q.shape[2]}, not {rope}")
    select(implementation)(q, latents, norm, positions, cos_sin, slots, plane, eps, interleaved)
