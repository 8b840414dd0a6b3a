"""In float32, rounded once."""

from __future__ import annotations

import torch


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
    rank, rope = len(norm), cos_sin.shape[1]
    angles = cos_sin[positions]
    rotated = q[:, :, q.shape[2] - rope :]
    rotated.copy_(rotate(rotated.float(), angles[:, None], interleaved))
    latent = latents[:, :rank].float()
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps) * norm.float()
    plane[slots, 0, :rank] = latent.to(plane.dtype)
    plane[slots, 0, rank:] = rotate(latents[:, rank:].float(), angles, interleaved).to(plane.dtype)


def rotate(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [..., rope], angles [..., rope]: cosines, then sines. Returns halves."""
    cosine, sine = angles.chunk(2, dim=-1)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
