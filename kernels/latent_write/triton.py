"""Norm, rotations and the write on the GPU in one launch: a block for a token's latent, others for some
of its heads each. float32 inside, rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher, next_power_of_two

if TYPE_CHECKING:
    from kernels.latent_write import WriteLatent

HEADS_AT_ONCE = 16


@triton.jit
def read_pairs(x_ptr, mask, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both channels of every pair that rotates together. x_ptr: [..., 1] block of pointers."""
    columns = tl.arange(0, BLOCK)[None, :]
    if INTERLEAVED:
        first = tl.load(x_ptr + 2 * columns, mask=mask, other=0.0)
        second = tl.load(x_ptr + 2 * columns + 1, mask=mask, other=0.0)
    else:
        first = tl.load(x_ptr + columns, mask=mask, other=0.0)
        second = tl.load(x_ptr + columns + HALF, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def write_tokens(
    q_ptr,
    latents_ptr,
    norm_ptr,
    positions_ptr,
    cos_sin_ptr,
    slots_ptr,
    plane_ptr,
    eps,
    Q_STRIDE: tl.constexpr,
    LATENTS_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Shapes as in `kernels.latent_write`; grid [T, 1 + HEADS / GROUP rounded up]."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    r = tl.arange(0, RANK_BLOCK)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(norm_ptr + r, mask=r < RANK, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions_ptr + token)
    angles = cos_sin_ptr + position * (2 * HALF) + columns[None, :]
    is_pair = (columns < HALF)[None, :]
    cosine = tl.load(angles, mask=is_pair, other=0.0)
    sine = tl.load(angles + HALF, mask=is_pair, other=0.0)
    if part == 0:
        slot = tl.load(slots_ptr + token)
        source = latents_ptr + token * LATENTS_STRIDE
        kind: tl.constexpr = plane_ptr.dtype.element_ty
        latent = tl.load(source + r, mask=r < RANK, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(latent * latent) / RANK + eps)
        target = plane_ptr + slot * (RANK + 2 * HALF)
        tl.store(target + r, (latent * scale * weight).to(kind), mask=r < RANK)
        key = source + RANK + tl.zeros([1, 1], tl.int32)
        k_first, k_second = read_pairs(key, is_pair, HALF, BLOCK, INTERLEAVED)
        places = target + RANK + columns[None, :]
        tl.store(places, (k_first * cosine - k_second * sine).to(kind), mask=is_pair)
        tl.store(places + HALF, (k_second * cosine + k_first * sine).to(kind), mask=is_pair)
    else:
        heads = (part - 1) * GROUP + tl.arange(0, GROUP)[:, None]
        mask = (heads < HEADS) & is_pair
        pairs = q_ptr + token * Q_STRIDE + heads * (NOPE + 2 * HALF) + NOPE
        first, second = read_pairs(pairs, mask, HALF, BLOCK, INTERLEAVED)
        tl.debug_barrier()  # all has been read before any of it is written
        q_kind: tl.constexpr = q_ptr.dtype.element_ty
        turned = pairs + columns[None, :]
        tl.store(turned, (first * cosine - second * sine).to(q_kind), mask=mask)
        tl.store(turned + HALF, (second * cosine + first * sine).to(q_kind), mask=mask)


def bind() -> WriteLatent:
    launch = Launcher(write_tokens)

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
    ) -> None:
        tokens, heads, query = q.shape
        if not tokens:
            return
        assert q.stride(2) == latents.stride(1) == 1 and q.stride(1) == query
        rank, rope = len(norm), cos_sin.shape[1]
        group = min(HEADS_AT_ONCE, next_power_of_two(heads))
        launch(
            (tokens, 1 + -(-heads // group), 1),
            (q, latents, norm, positions, cos_sin, slots, plane),
            (eps,),
            (
                q.stride(0),
                latents.stride(0),
                heads,
                query - rope,
                rope // 2,
                rank,
                group,
                next_power_of_two(rope // 2),
                next_power_of_two(rank),
                interleaved,
            ),
        )

    return write_latent
