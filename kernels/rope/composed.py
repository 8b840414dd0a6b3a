"""Rotation of q and k together, and the writes into the KV planes, out of torch calls."""

from __future__ import annotations

import torch

from kernels.rope.reference import read, store


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
    rotated = heads[:, :first_v].float()
    if q_norm is not None and k_norm is not None:
        scale = torch.rsqrt(rotated.square().mean(dim=-1, keepdim=True).add_(eps))
        rotated *= scale
        rotated[:, :num_heads] *= q_norm
        rotated[:, num_heads:] *= k_norm
    half = head_dim // 2
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    out = torch.empty_like(heads[:, :first_v])
    out[..., :half] = (first * cos).sub_(second * sin)
    out[..., half:] = (second * cos).add_(first * sin)
    own_k, v = heads[:, num_heads:first_v], heads[:, first_v:]
    if k_plane.dtype == torch.float8_e4m3fn:
        store(k_plane, slots, out[:, num_heads:], k_scale)
        store(v_plane, slots, v, v_scale)
        if keep:
            own_k.copy_(read(k_plane, slots, k_scale))
            v.copy_(read(v_plane, slots, v_scale))
        return out[:, :num_heads]
    k_plane.index_copy_(0, slots, out[:, num_heads:].to(k_plane.dtype))
    v_plane.index_copy_(0, slots, v.to(v_plane.dtype))
    if keep:
        own_k.copy_(out[:, num_heads:])
    return out[:, :num_heads]
