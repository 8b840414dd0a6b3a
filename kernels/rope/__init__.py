"""Rotary embedding of q and k by halves, and the write of k and v into the KV planes.

Optionally q and k heads are RMS-normed first (Qwen3). A token's result does not depend on the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kernels.choice import (
    check_dtype,
    check_native_dtype,
    check_shape,
    check_triton_layout,
    refuse_implementation,
    require_library,
    require_triton,
)
from kernels.rope import composed, native, reference

if TYPE_CHECKING:
    from kernels.native_build import Library


class RopeWriteKV(Protocol):
    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        k_plane: torch.Tensor,
        v_plane: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        keep: bool = False,
    ) -> torch.Tensor: ...


def select(implementation: str, library: Library | None = None) -> RopeWriteKV:
    """The unchecked function, for the hot path."""
    match implementation:
        case "reference":
            return reference.rope_write_kv
        case "torch":
            return composed.rope_write_kv
        case "native":
            return native.bind(require_library(library))
        case "triton":
            require_triton()
            from kernels.rope import triton

            return triton.bind()
    refuse_implementation(implementation)


def rope_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    k_plane: torch.Tensor,
    v_plane: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    keep: bool = False,
    *,
    implementation: str = "torch",
    library: Library | None = None,
) -> torch.Tensor:
    """Returns the rotated q, [T, num_heads, head_dim] in qkv's dtype; maybe not contiguous.

    qkv: [T, (num_heads + 2 num_kv_heads) * head_dim], q then k then v. positions, slots: [T] int64.
    cos_sin: [context, head_dim] float32, the cosines of the head_dim/2 angles, then their sines.
    k_plane, v_plane: [num_slots, num_kv_heads, head_dim], written at `slots`; slots must differ,
    except for padding (slot of page 0), where any of the writers may win.
    q_norm, k_norm: [head_dim], both or neither: weights of an RMS norm of each head before rotation.
    k_scale, v_scale: only for planes of torch.float8_e4m3fn, which hold value / scale, cut off at 448.
    keep: k and v as the planes then hold them also take their places in qkv, whose dtype the planes have
    unless it is e4m3.
    Positions and slots are trusted to be in range.
    """
    tokens = qkv.shape[0]
    check_shape("qkv", qkv, (None, (num_heads + 2 * num_kv_heads) * head_dim))
    check_shape("positions", positions, (tokens,))
    check_shape("slots", slots, (tokens,))
    check_shape("cos_sin", cos_sin, (None, head_dim))
    check_shape("k_plane", k_plane, (None, num_kv_heads, head_dim))
    check_shape("v_plane", v_plane, tuple(k_plane.shape))
    check_dtype("positions", positions, torch.int64)
    check_dtype("slots", slots, torch.int64)
    check_dtype("cos_sin", cos_sin, torch.float32)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, not {head_dim}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given both or not at all")
    check_dtype("v_plane", v_plane, k_plane.dtype)
    if k_scale <= 0 or v_scale <= 0:
        raise ValueError(f"k_scale and v_scale must be above 0, not {k_scale} and {v_scale}")
    if k_plane.dtype != torch.float8_e4m3fn and not k_scale == v_scale == 1:
        raise ValueError(f"k_scale and v_scale must be 1 for planes of {k_plane.dtype}")
    check_native_dtype(
        implementation, qkv=qkv, k_plane=k_plane, v_plane=v_plane, q_norm=q_norm, k_norm=k_norm
    )
    check_triton_layout(
        implementation,
        qkv=qkv,
        positions=positions,
        cos_sin=cos_sin,
        slots=slots,
        k_plane=k_plane,
        v_plane=v_plane,
        q_norm=q_norm,
        k_norm=k_norm,
    )
    return select(implementation, library)(
        qkv,
        positions,
        cos_sin,
        slots,
        k_plane,
        v_plane,
        num_heads,
        num_kv_heads,
        head_dim,
        q_norm,
        k_norm,
        eps,
        k_scale,
        v_scale,
        keep,
    )
