"""Rotary position tables: which angle each pair of channels turns by at each position.

A table is made once per runner, in float64, and kept as float32 [context_length, head_dim]: cosines of
the head_dim/2 frequencies, then their sines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from srt.errors import ConfigError

KNOWN = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Numbers of one rope kind. `factor` and below are read only by the kinds that use them."""

    kind: str
    theta: float
    head_dim: int
    original_context: int
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends outwards to whole channels
    attention_factor: float = 1.0  # yarn: cosines and sines are multiplied by it


def read_rope_scaling(config: dict[str, Any], head_dim: int, name: str) -> RopeScaling:
    """Reads `rope_parameters` (newer files) or `rope_theta` and `rope_scaling` (older ones)."""
    values: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = values.get("rope_type", values.get("type", "default"))
    theta = float(values.get("rope_theta", config.get("rope_theta", 10000.0)))
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind not in KNOWN:
        raise ConfigError(
            f"{name}: rope type {kind!r} is not implemented; known: {', '.join(KNOWN)}"
        )
    if partial != 1.0:
        raise ConfigError(f"{name}: partial_rotary_factor {partial} is not implemented, only 1.0")
    context = int(config.get("max_position_embeddings", 2048))
    original = int(values.get("original_max_position_embeddings") or context)
    factor = float(values.get("factor") or 1.0)
    return RopeScaling(
        kind=kind,
        theta=theta,
        head_dim=head_dim,
        original_context=original,
        factor=factor,
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_attention_factor(values, factor) if kind == "yarn" else 1.0,
    )


def build_cos_sin(
    rope: RopeScaling,
    context_length: int,
    device: torch.device,
    divisors: torch.Tensor | None = None,
) -> torch.Tensor:
    """[context_length, head_dim] float32: cosines, then sines. `divisors` [head_dim / 2]: what a
    checkpoint says to divide each frequency by, on top."""
    positions = torch.arange(context_length, dtype=torch.float64)
    frequencies = inverse_frequencies(rope)
    if divisors is not None:
        frequencies = frequencies / divisors.double()
    angles = torch.outer(positions, frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    return table.to(device=device, dtype=torch.float32)


def inverse_frequencies(rope: RopeScaling) -> torch.Tensor:
    """[head_dim / 2] float64: radians per position of each channel pair."""
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float64) / rope.head_dim
    plain = rope.theta**-exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: RopeScaling, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, and those between are blended by how many
    turns they make within the original context (Llama 3.1 model card)."""
    turns = rope.original_context * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return plain * keep + plain / rope.factor * (1.0 - keep)


def _yarn(rope: RopeScaling, plain: torch.Tensor) -> torch.Tensor:
    """Like llama3, but the blend runs linearly over channel numbers (YaRN, arXiv 2309.00071, 3.2)."""

    def channel(turns: float) -> float:
        """The channel pair whose wave makes `turns` turns within the original context."""
        wave = rope.original_context / (turns * 2 * math.pi)
        return rope.head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    index = torch.arange(rope.head_dim // 2, dtype=torch.float64)
    slow = ((index - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return plain * (1.0 - slow) + plain / rope.factor * slow


def _attention_factor(values: dict[str, Any], factor: float) -> float:
    """YaRN's temperature on the logits, as a factor of cosines and sines (arXiv 2309.00071, 3.4)."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    given = values.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if mscale and all_dim:
        return magnitude(float(mscale)) / magnitude(float(all_dim))
    return magnitude(1.0)
