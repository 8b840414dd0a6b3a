"""The target as a dense model over [B, T] tokens: for writing text and for features, not for serving.

Same weight maps, loading and numbers as `srt.models`; rows of a batch do not share pages, so attention
is one call over a rectangle. Any family whose model is `srt.models.decoder.DenseDecoder` runs here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.linear.quantized import QuantizedWeight
from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.layers.parameters import Weights
from srt.layers.rope import build_cos_sin
from srt.loading.checkpoint import open_checkpoint
from srt.loading.fill import fill
from srt.loading.shards import as_stored
from srt.models.arch import Arch, read_arch
from srt.models.registry import model_family
from srt.spec.train.fuse import fuse


class PlainLinear:
    """An unpacked `kernels.linear.Linear`, for inputs [..., in]."""

    __slots__ = ("weight", "bias")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Attend(Protocol):
    """Attention of one layer over q [B, heads, T, D] and the new k, v [B, kv heads, T, D]."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Pass:
    """`hidden` [B, T, H]: final and normed. `features` [B, T, 3H]: the residual stream as it enters
    each of the tapped layers, side by side; None without taps."""

    hidden: torch.Tensor
    features: torch.Tensor | None


@fuse
def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [B, heads, T, D]; cos_sin [T, D] or [B, 1, T, D], cosines then sines: channel i turns with
    i + D/2."""
    cos, sin = cos_sin.to(x.dtype).chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


@fuse
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


class DenseTarget:
    def __init__(self, arch: Arch, weights: Weights, cos_sin: torch.Tensor) -> None:
        self.arch = arch
        self.cos_sin = cos_sin
        self.weights = weights
        self.embedding = weights.tensors["embedding"]
        self.final_norm = weights.tensors["norm"]
        self.head = weights.linears["head"]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def default_taps(self) -> tuple[int, int, int]:
        """The layers whose inputs are the features (EAGLE-3's choice: low, middle, high)."""
        count = self.arch.num_layers
        return (2, count // 2, count - 3) if count > 6 else (0, count // 2, count - 1)

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, H]"""
        assert isinstance(self.head, PlainLinear)
        return self.head.weight

    def forward(
        self, tokens: torch.Tensor, attend: Attend, taps: tuple[int, ...] = (),
        positions: torch.Tensor | None = None,
    ) -> Pass:  # fmt: skip
        """tokens [B, T] int64 at `positions` [B, T], by default 0 to T-1."""
        arch = self.arch
        x = F.embedding(tokens, self.embedding)
        if positions is None:
            cos_sin = self.cos_sin[: tokens.shape[1]]
        else:
            cos_sin = F.embedding(positions, self.cos_sin).unsqueeze(1)
        features = []
        for index in range(arch.num_layers):
            if index in taps:
                features.append(x)
            x = self._layer(index, x, cos_sin, attend)
        hidden = F.rms_norm(x, (arch.hidden_size,), self.final_norm, arch.norm_eps)
        return Pass(hidden, torch.cat(features, dim=-1) if features else None)

    def _layer(
        self, index: int, x: torch.Tensor, cos_sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        arch, tensors, linears = self.arch, self.weights.tensors, self.weights.linears
        name, size, eps = f"layers.{index}", (arch.hidden_size,), arch.norm_eps
        rows, length, _ = x.shape
        normed = F.rms_norm(x, size, tensors[f"{name}.input_norm"], eps)
        qkv = linears[f"{name}.qkv"](normed).view(rows, length, -1, arch.head_dim)
        q_end, k_end = arch.num_heads, arch.num_heads + arch.num_kv_heads
        q, k, v = qkv[:, :, :q_end], qkv[:, :, q_end:k_end], qkv[:, :, k_end:]
        if f"{name}.q_norm" in tensors:
            q = F.rms_norm(q, (arch.head_dim,), tensors[f"{name}.q_norm"], eps)
            k = F.rms_norm(k, (arch.head_dim,), tensors[f"{name}.k_norm"], eps)
        q, k = rotate(q.transpose(1, 2), cos_sin), rotate(k.transpose(1, 2), cos_sin)
        mixed = attend(index, q, k, v.transpose(1, 2)).transpose(1, 2)
        x = x + linears[f"{name}.out"](mixed.reshape(rows, length, -1))
        normed = F.rms_norm(x, size, tensors[f"{name}.mlp_norm"], eps)
        gate, up = linears[f"{name}.gate_up"](normed).chunk(2, dim=-1)
        return x + linears[f"{name}.down"](silu_mul(gate, up))


class Causal:
    """Every token sees those before it, within the layer's window; rows are padded at their ends."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self._windows = windows

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        window, length = self._windows[layer], q.shape[2]
        if window is None or window >= length:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        place = torch.arange(length, device=q.device)
        back = place[:, None] - place[None]
        mask = (back >= 0) & (back < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def load_target(
    facts: ModelFacts, *, dtype: torch.dtype, device: torch.device, max_tokens: int, seed: int = 0,
    load_format: str | None = None,
) -> DenseTarget:  # fmt: skip
    """Raises ConfigError for a model that is not one of the dense families, or not whole."""
    arch = read_arch(facts)
    parameters = model_family(facts.architecture).parameters(arch)
    path = Path(facts.path)
    checkpoint = open_checkpoint(
        path, load_format or facts.format, facts, parameters, dtype=dtype, seed=seed
    )
    if (load_format or facts.format) == "sharded":
        parameters = as_stored(parameters)
    weights = fill(
        parameters, checkpoint.tensors, dtype=dtype, device=device,
        pack=_pack, origin=str(path),
    )  # fmt: skip
    cos_sin = build_cos_sin(arch.rope, max_tokens, device, checkpoint.rope_divisors)
    return DenseTarget(arch, weights, cos_sin)


def _pack(
    name: str, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None
) -> PlainLinear:
    if not isinstance(weight, torch.Tensor):
        raise ConfigError(f"{name} is quantized; a draft is trained on a target that is not")
    return PlainLinear(weight, bias)
