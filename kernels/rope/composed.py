"""Rotation of q and k together, and the writes into the KV planes, out of torch calls."""

from __future__ import annotations

import torch

from kernels.rope.reference import store


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
    keep_k: bool = False,
) -> torch.Tensor:
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    rotated = heads[:, : num_heads + num_kv_heads].float()
    if q_norm is not None and k_norm is not None:
        scale = torch.rsqrt(rotated.square().mean(dim=-1, keepdim=True).add_(eps))
        rotated *= scale
        rotated[:, :num_heads] *= q_norm
        rotated[:, num_heads:] *= k_norm
    half = head_dim // 2
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    out = torch.empty_like(heads[:, : num_heads + num_kv_heads])
    out[..., :half] = (first * cos).sub_(second * sin)
    out[..., half:] = (second * cos).add_(first * sin)
    if keep_k:
        heads[:, num_heads : num_heads + num_kv_heads] = out[:, num_heads:]
    if k_plane.dtype == torch.float8_e4m3fn:
        store(k_plane, slots, out[:, num_heads:], k_scale)
        store(v_plane, slots, heads[:, num_heads + num_kv_heads :], v_scale)
        return out[:, :num_heads]
    k_plane.index_copy_(0, slots, out[:, num_heads:].to(k_plane.dtype))
    v_plane.index_copy_(0, slots, heads[:, num_heads + num_kv_heads :].to(v_plane.dtype))
    return out[:, :num_heads]
