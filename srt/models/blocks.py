"""Pieces that dense decoders share as they are; whatever differs stays in the family's own file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.linear import AddingLinear, FusedLinear, Linear
from kernels.ops import Ops
from srt.layers.parameters import Parameter, Weights
from srt.models.arch import Arch
from srt.protocols.attention import Attention, AttentionBatch
from srt.protocols.kv_pool import KVPool


@dataclass(slots=True, kw_only=True)
class Taps:
    """Where a forward pass is listened to: drafts feed on what their target thinks. Layer i: the
    residual stream that enters decoder layer i, as it is; the number of layers: the final normed hidden
    states. `taken` [T, H] each, in the order of `layers`, which is ascending."""

    layers: tuple[int, ...]
    taken: list[torch.Tensor] = field(default_factory=list)

    def take(self, layer: int, stream: torch.Tensor) -> None:
        if layer in self.layers:
            self.taken.append(stream.clone())


class CausalModel(Protocol):
    """What a runner needs of a model. T tokens, H hidden size, S rows to score, V vocabulary."""

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: Attention,
        keep: torch.Tensor | None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """token_ids [T] int64, planned `attention`. Writes K and V of all T tokens; returns the final
        normed hidden states [T, H], or only those of the tokens `keep` [S] int64 names: [S, H]. `taps`
        are filled for all T tokens."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] -> [S, V] float32."""
        ...


class Family(Protocol):
    """What a file in this folder gives: what a checkpoint must hold, and the model it makes."""

    def parameters(self, arch: Arch) -> list[Parameter]:
        """The weight map: every parameter, and the checkpoint tensors that fill it."""
        ...

    def build(
        self, arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor
    ) -> CausalModel: ...


class Mlp(Protocol):
    """The second half of a decoder layer: [T, H] -> [T, H]."""

    @property
    def is_fused(self) -> bool:
        """Whether it takes in the norm before and the sum behind it: `add_normed` may be used."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_normed(self, stream: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """stream + self(rms_norm(stream, weight, eps)); `stream` is written."""
        ...


class GatedMlp:
    """down(silu(gate(x)) * up(x)), with gate and up in one linear; where that is a fused one, it does
    what stands between the two as well."""

    __slots__ = ("gate_up", "down", "silu_mul")

    def __init__(self, weights: Weights, name: str, ops: Ops) -> None:
        self.gate_up: Linear = weights.linears[f"{name}.gate_up"]
        self.down: Linear = weights.linears[f"{name}.down"]
        self.silu_mul = None if isinstance(self.gate_up, FusedLinear) else ops.silu_mul

    @property
    def is_fused(self) -> bool:
        return isinstance(self.gate_up, FusedLinear) and isinstance(self.down, AddingLinear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.gate_up(x)
        return self.down(inner if self.silu_mul is None else self.silu_mul(inner))

    def add_normed(self, stream: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """stream + self(rms_norm(stream, weight, eps)); `stream` is written. Both linears fused."""
        assert isinstance(self.gate_up, FusedLinear) and isinstance(self.down, AddingLinear)
        return self.down.added(self.gate_up.normed(stream, weight, eps), stream)

    def add(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """stream + self(x); `stream` is written. Both linears fused."""
        assert isinstance(self.gate_up, FusedLinear) and isinstance(self.down, AddingLinear)
        return self.down.added(self.gate_up(x), stream)
