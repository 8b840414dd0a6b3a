"""Rotary embedding (Su et al. 2021) by halves ("neox" order), in float32, rounded once.

For a head h of size d and the angles a of its position: first = h[:d/2], second = h[d/2:];
out = [first * cos a - second * sin a, second * cos a + first * sin a].
"""

from __future__ import annotations

import torch

from kernels.rms_norm import reference as norm


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
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    first_v = num_heads + num_kv_heads
    q, own_k, v = heads[:, :num_heads], heads[:, num_heads:first_v], heads[:, first_v:]
    angles = cos_sin[positions]
    q, k = rotate(q, angles, q_norm, eps), rotate(own_k, angles, k_norm, eps)
    store(k_plane, slots, k, k_scale)
    store(v_plane, slots, v, v_scale)
    if keep:
        own_k.copy_(read(k_plane, slots, k_scale))
        v.copy_(read(v_plane, slots, v_scale))
    return q.to(qkv.dtype)


def store(plane: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor, scale: float) -> None:
    """e4m3 holds value / scale; what lies outside its range becomes its largest number."""
    if plane.dtype != torch.float8_e4m3fn:
        plane[slots] = heads.to(plane.dtype)
        return
    limit = torch.finfo(plane.dtype).max
    scaled = (heads.float() / scale).clamp(-limit, limit).to(plane.dtype)
    plane.view(torch.uint8)[slots] = scaled.view(torch.uint8)  # a copy of e4m3 by index needs bytes


def read(plane: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """What `store` left there."""
    if plane.dtype != torch.float8_e4m3fn:
        return plane[slots]
    return plane.view(torch.uint8)[slots].view(plane.dtype).float() * scale


def rotate(
    heads: torch.Tensor, angles: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """heads: [T, h, d]; angles: [T, d], cosines first. Returns float32."""
    wide = heads.float()
    if weight is not None:
        wide = norm.rms_norm(wide, weight, eps)
    first, second = wide.chunk(2, dim=-1)
    cos, sin = angles[:, None, :].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
