"""Head norms, rotation and the KV write in one launch: a block per token and group of heads.

A group holds q heads, k heads or v heads, never two kinds: its size divides both counts. float32
inside, rounded once, also into the planes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher, next_power_of_two

if TYPE_CHECKING:
    from kernels.rope import RopeWriteKV

MAX_GROUP = 8
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def store_half(plane_ptr, places, mask, numbers, inverse, scale, own_ptr, KEEP: tl.constexpr):
    """Half of some heads, in the plane's type: e4m3 as value / scale, kept within its range. KEEP: what
    the plane now holds goes to own_ptr, too."""
    kind: tl.constexpr = plane_ptr.dtype.element_ty
    if kind == tl.float8e4nv:
        numbers = tl.clamp(numbers * inverse, -E4M3_MAX, E4M3_MAX)
    stored = numbers.to(kind)
    tl.store(plane_ptr + places, stored, mask=mask)
    if KEEP:
        if kind == tl.float8e4nv:
            stored = stored.to(tl.float32) * scale
        tl.store(own_ptr, stored.to(own_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotate_token(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    eps,
    k_inverse,
    v_inverse,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Shapes as in `kernels.rope.rope_write_kv`; grid: [T * (HEADS + 2 KV_HEADS) / GROUP]."""
    groups: tl.constexpr = (HEADS + 2 * KV_HEADS) // GROUP
    token = (tl.program_id(0) // groups).to(tl.int64)
    head = tl.program_id(0) % groups * GROUP  # the first of the group, among q, k and v heads
    columns = tl.arange(0, BLOCK)
    mask = (columns < HALF)[None, :]
    heads = tl.arange(0, GROUP)[:, None]
    in_heads = heads * (2 * HALF) + columns[None, :]
    in_head = heads * 0 + columns[None, :]  # what heads share is loaded in the layout of heads
    if NORM:
        norm_ptr = q_norm_ptr if head < HEADS else k_norm_ptr
        first_weight = tl.load(norm_ptr + in_head, mask=mask, other=0.0).to(tl.float32)
        second_weight = tl.load(norm_ptr + HALF + in_head, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions_ptr + token)  # first: the angles wait for it
    slot = tl.load(slots_ptr + token)
    heads_ptr = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + in_heads
    first_half = tl.load(heads_ptr, mask=mask, other=0.0)
    second_half = tl.load(heads_ptr + HALF, mask=mask, other=0.0)
    angles = cos_sin_ptr + position * (2 * HALF) + in_head
    if head < HEADS + KV_HEADS:
        cosine = tl.load(angles, mask=mask, other=0.0)
        sine = tl.load(angles + HALF, mask=mask, other=0.0)
        first, second = first_half.to(tl.float32), second_half.to(tl.float32)
        if NORM:
            squares = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
            scale = tl.rsqrt(squares + eps)[:, None]
            first = first * scale * first_weight
            second = second * scale * second_weight
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        if head < HEADS:
            places = (token * HEADS + head) * (2 * HALF) + in_heads
            store_half(q_ptr, places, mask, turned, 1.0, 1.0, None, False)
            store_half(q_ptr, places + HALF, mask, second, 1.0, 1.0, None, False)
        else:
            places = (slot * KV_HEADS + head - HEADS) * (2 * HALF) + in_heads
            own = heads_ptr + HALF
            store_half(k_ptr, places, mask, turned, k_inverse, k_scale, heads_ptr, KEEP)
            store_half(k_ptr, places + HALF, mask, second, k_inverse, k_scale, own, KEEP)
    else:
        places = (slot * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + in_heads
        first, second = first_half.to(tl.float32), second_half.to(tl.float32)
        ROUNDED: tl.constexpr = KEEP and v_ptr.dtype.element_ty != qkv_ptr.dtype.element_ty
        own = heads_ptr + HALF
        store_half(v_ptr, places, mask, first, v_inverse, v_scale, heads_ptr, ROUNDED)
        store_half(v_ptr, places + HALF, mask, second, v_inverse, v_scale, own, ROUNDED)


def bind() -> RopeWriteKV:
    launch = Launcher(rotate_token)

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
    ) -> torch.Tensor:
        tokens = qkv.shape[0]
        q = qkv.new_empty((tokens, num_heads, head_dim))
        if not tokens:
            return q
        shared = math.gcd(num_heads, num_kv_heads)
        group = min(shared & -shared, MAX_GROUP)  # the largest power of two in both counts
        half = head_dim // 2
        block = next_power_of_two(half)
        launch(
            (tokens * (num_heads + 2 * num_kv_heads) // group, 1, 1),
            (qkv, positions, cos_sin, slots, k_plane, v_plane, q_norm, k_norm, q),
            (eps, 1.0 / k_scale, 1.0 / v_scale, k_scale, v_scale),
            (num_heads, num_kv_heads, half, group, block, q_norm is not None, keep),
            num_warps=min(max(group * block // 256, 1), 4),
        )
        return q

    return rope_write_kv
