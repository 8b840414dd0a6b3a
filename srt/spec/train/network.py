"""The EAGLE-3 draft as a trainable module; parameters are named as published checkpoints name them.

    f0 = fc(three features of the target, side by side)
    x  = [input_layernorm(embedding of the token), hidden_norm(f)]
    r  = f + attention(x),  h = r + mlp(post_attention_layernorm(r))
    the next feature is h; the logits are head(norm(h)) over the hot tokens

Slot q holds the pair (feature of position q-1, token q) and predicts token q+1; slot 0 has a zero
feature. Network: EAGLE-3 (arXiv 2503.01840), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from srt.spec.train.target import rotate, silu_mul

AttendSteps = Callable[[torch.Tensor, list[torch.Tensor], list[torch.Tensor], float], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """`target_size`: the target's hidden size; three features of it are fused into `hidden_size`."""

    hidden_size: int
    target_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float


class Matrix(nn.Module):
    """A linear without bias whose float32 weight is used in the input's type."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs).normal_(0.0, inputs**-0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Matrix(2 * shape.hidden_size, q_size)
        self.k_proj = Matrix(2 * shape.hidden_size, kv_size)
        self.v_proj = Matrix(2 * shape.hidden_size, kv_size)
        self.o_proj = Matrix(q_size, shape.hidden_size)

    def forward(
        self, x: torch.Tensor, cos_sin: torch.Tensor, keys: list[torch.Tensor],
        values: list[torch.Tensor], attend: AttendSteps,
    ) -> torch.Tensor:  # fmt: skip
        """x [B, T, 2H]. Appends this step's keys and values, with as many heads as queries have."""
        rows, length, _ = x.shape
        size, group = self.shape.head_dim, self.shape.num_heads // self.shape.num_kv_heads
        q = rotate(self.q_proj(x).view(rows, length, -1, size).transpose(1, 2), cos_sin)
        k = rotate(self.k_proj(x).view(rows, length, -1, size).transpose(1, 2), cos_sin)
        v = self.v_proj(x).view(rows, length, -1, size).transpose(1, 2)
        keys.append(k.repeat_interleave(group, dim=1))
        values.append(v.repeat_interleave(group, dim=1))
        mixed = attend(q, keys, values, size**-0.5)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))  # type: ignore[no-any-return]


class GatedMlp(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Matrix(size, inner)
        self.up_proj = Matrix(size, inner)
        self.down_proj = Matrix(inner, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


class MidLayer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm = Norm(size, eps)
        self.hidden_norm = Norm(size, eps)
        self.post_attention_layernorm = Norm(size, eps)
        self.self_attn = Attention(shape)
        self.mlp = GatedMlp(size, shape.intermediate_size)

    def forward(
        self, embedded: torch.Tensor, feature: torch.Tensor, cos_sin: torch.Tensor,
        keys: list[torch.Tensor], values: list[torch.Tensor], attend: AttendSteps,
    ) -> torch.Tensor:  # fmt: skip
        """embedded and feature [B, T, H] -> the next feature [B, T, H]."""
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(feature)), dim=-1)
        r = feature + self.self_attn(x, cos_sin, keys, values, attend)
        return r + self.mlp(self.post_attention_layernorm(r))  # type: ignore[no-any-return]


class DraftNetwork(nn.Module):
    """`state_dict()` is the checkpoint, but for d2t. The embedding and the head are the target's."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Matrix(3 * shape.target_size, shape.hidden_size)
        self.midlayer = MidLayer(shape)
        self.norm = Norm(shape.hidden_size, shape.norm_eps)

    @torch.no_grad()
    def start_from(self, final_norm: torch.Tensor) -> None:
        """A head start where sizes allow: the feature begins as the target's last tap, and is read as
        the target reads its own last layer."""
        size = self.shape.hidden_size
        if size != self.shape.target_size:
            return
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, 2 * size :].add_(torch.eye(size, device=self.fc.weight.device))
        self.midlayer.self_attn.o_proj.weight.mul_(0.1)
        self.midlayer.mlp.down_proj.weight.mul_(0.1)
        self.norm.weight.copy_(final_norm)
