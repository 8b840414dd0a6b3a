"""Decoder layers one after the other: attention and an MLP, each behind a norm and added to the stream
that it reads. What attention is, a family's own stack says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from kernels.linear import AddingLinear, FusedLinear, Linear
from kernels.ops import Ops
from srt.layers.parameters import Weights
from srt.models.arch import Arch
from srt.models.blocks import Mlp, Taps
from srt.protocols.attention import Attention, AttentionBatch
from srt.protocols.kv_pool import KVPool


class StackLayer:
    """`inputs` makes of x [T, H] what attention starts from, `out` [T, H] of what its heads gather. The
    norm behind the MLP is the next layer's, applied with the sum; a draft's first layer may have no
    `input_norm`."""

    __slots__ = ("inputs", "out", "mlp", "input_norm", "mlp_norm")

    def __init__(
        self,
        weights: Weights,
        name: str,
        inputs: Callable[[torch.Tensor], torch.Tensor],
        mlp: Mlp,
    ) -> None:
        self.inputs = inputs
        self.out: Linear = weights.linears[f"{name}.out"]
        self.mlp = mlp
        self.input_norm = weights.tensors.get(f"{name}.input_norm")
        self.mlp_norm = weights.tensors[f"{name}.mlp_norm"]

    @property
    def is_fused(self) -> bool:
        """Whether its linears can take in what stands before and behind them."""
        attention = isinstance(self.inputs, FusedLinear) and isinstance(self.out, AddingLinear)
        return self.mlp.is_fused and attention


L = TypeVar("L", bound=StackLayer)


class Stack(ABC, Generic[L]):
    """`norm`: behind the last layer, if there is one."""

    def __init__(
        self, arch: Arch, ops: Ops, layers: Sequence[L], norm: torch.Tensor | None
    ) -> None:
        self.arch = arch
        self.ops = ops
        self.layers = layers
        self.norms = [*(layer.input_norm for layer in layers), norm]  # each before what it leads
        assert all(norm is not None for norm in self.norms[1:-1])
        self.is_fused = all(layer.is_fused for layer in layers)

    @abstractmethod
    def attend(
        self,
        made: torch.Tensor,
        index: int,
        batch: AttentionBatch,
        pool: KVPool,
        attention: Attention,
    ) -> torch.Tensor:
        """What the heads of layer `index` gather, side by side, from what its `inputs` made."""

    def pays(self, num_tokens: int) -> bool:
        """Whether fused forms cost so many tokens less than separate ones. Asked where all are fused."""
        return True

    def forward(
        self,
        residual: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: Attention,
        keep: torch.Tensor | None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """residual [T, H], what enters the first layer; the rest as in `CausalModel.forward`."""
        if self.is_fused and self.pays(len(residual)):
            return self._forward_fused(residual, batch, pool, attention, keep, taps)
        ops, eps, norms = self.ops, self.arch.norm_eps, self.norms
        first = norms[0]
        x = residual if first is None else ops.rms_norm(residual, first, eps)
        early, late = self._divide(keep, taps)
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.take(index, residual)
            x = self.attend(layer.inputs(x), index, batch, pool, attention)
            if early is not None and layer is self.layers[-1]:
                x, residual = x[early], residual[early]
            x, residual = ops.add_rms_norm(layer.out(x), residual, layer.mlp_norm, eps)
            following = norms[index + 1]
            if following is None:
                x = residual + layer.mlp(x)
            else:
                x, residual = ops.add_rms_norm(layer.mlp(x), residual, following, eps)
        return self._leave(x, late, taps)

    def _forward_fused(
        self,
        stream: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: Attention,
        keep: torch.Tensor | None,
        taps: Taps | None,
    ) -> torch.Tensor:
        """The same, with norms and sums inside the linears. `stream` is written."""
        eps = self.arch.norm_eps
        early, late = self._divide(keep, taps)
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.take(index, stream)
            inputs, out, norm = layer.inputs, layer.out, layer.input_norm
            assert isinstance(inputs, FusedLinear) and isinstance(out, AddingLinear)
            made = inputs(stream) if norm is None else inputs.normed(stream, norm, eps)
            x = self.attend(made, index, batch, pool, attention)
            if early is not None and layer is self.layers[-1]:
                x, stream = x[early], stream[early]
            stream = layer.mlp.add_normed(out.added(x, stream), layer.mlp_norm, eps)
        final = self.norms[-1]
        x = stream if final is None else self.ops.rms_norm(stream, final, eps)
        return self._leave(x, late, taps)

    def _divide(
        self, keep: torch.Tensor | None, taps: Taps | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`keep`, if it may be applied behind the last attention, below which nothing mixes tokens; else
        behind it all, for taps that want the final states of every token."""
        wants_all = taps is not None and self.arch.num_layers in taps.layers
        return (None, keep) if wants_all else (keep, None)

    def _leave(self, x: torch.Tensor, late: torch.Tensor | None, taps: Taps | None) -> torch.Tensor:
        if taps is not None:
            taps.take(self.arch.num_layers, x)
        return x if late is None else x[late]


class StackDecoder:
    """A stack between an embedding and a head. See `srt.models.blocks.CausalModel` for the contract."""

    def __init__(self, weights: Weights, stack: Stack[Any]) -> None:
        self.embedding = weights.tensors["embedding"]
        self.head = weights.linears["head"]
        self.stack = stack

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: Attention,
        keep: torch.Tensor | None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        embedded = self.stack.ops.embed(token_ids, self.embedding)
        return self.stack.forward(embedded, batch, pool, attention, keep, taps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)
