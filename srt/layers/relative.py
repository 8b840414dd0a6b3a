"""What an Inkling model says of its layers.

Attention has no rotary positions. A head has `d_rel` numbers r of its token besides q, and the layer a
bank P [d_rel, extent]: at distance d the score gets (r P)[d], beyond the extent nothing. q and k are
normed, so scores are scaled by 1 / head_dim. In layers that see everything, position n multiplies q and
the bias by 1 + alpha * log(max(1, (n + 1) / floor)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeLayer:
    """`window`: tokens seen, its own included; None: all. `floor`: None: no scaling by position."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    extent: int
    floor: int | None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeArch:
    """`taps`: tokens of a short convolution. `stored_vocab`: rows of embedding and head in the
    checkpoint, those behind the vocabulary mean nothing. `divisor`: of the states before the head.
    `state_bytes`: see `srt.config.inkling`."""

    layers: tuple[RelativeLayer, ...]
    d_rel: int
    alpha: float
    taps: int
    stored_vocab: int
    divisor: float
    state_bytes: int

    @property
    def kv_items(self) -> int:
        return 2 * sum(layer.kv_size for layer in self.layers)

    def state_widths(self, hidden_size: int) -> list[int]:
        """Of each layer, the inputs of its convolutions side by side: K, V, attention, MLP."""
        return [2 * layer.kv_size + 2 * hidden_size for layer in self.layers]


def stretch(positions: torch.Tensor, floor: int, alpha: float) -> torch.Tensor:
    """positions [T] -> [T] float32, what queries are multiplied by."""
    return 1.0 + alpha * torch.log(((positions + 1).float() / floor).clamp(min=1.0))
