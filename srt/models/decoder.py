"""The decoder that most families share: grouped-query attention, gated MLP or a mixture of them, one
norm before each.

Families differ in what fills it, their weight maps, and in numbers of `Arch`; a norm of q and k heads is
there when the weight map has one. A family that computes anything else brings its own model. Draft
networks whose layers are such layers have the same stack of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.linear import FusedLinear
from kernels.ops import Ops
from srt.layers.parameters import Weights
from srt.models.arch import Arch
from srt.models.blocks import GatedMlp, Mlp
from srt.models.moe import build_mlp
from srt.models.stack import Stack, StackDecoder, StackLayer
from srt.protocols.attention import Attention, AttentionBatch
from srt.protocols.kv_pool import KVPool


class DenseLayer(StackLayer):
    """`q_norm` and `k_norm` are there if the family has them. `mlp`: another than the usual one."""

    __slots__ = ("q_norm", "k_norm", "window")

    def __init__(
        self,
        weights: Weights,
        name: str,
        ops: Ops,
        window: int | None,
        mlp: Mlp | None = None,
    ) -> None:
        super().__init__(
            weights, name, self.project(weights, name), mlp or GatedMlp(weights, name, ops)
        )
        self.q_norm = weights.tensors.get(f"{name}.q_norm")
        self.k_norm = weights.tensors.get(f"{name}.k_norm")
        self.window = window

    def project(self, weights: Weights, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """What makes q, k and v side by side of x [T, H]."""
        return weights.linears[f"{name}.qkv"]


class DenseStack(Stack[DenseLayer]):
    """Layers `layers.0` and on, or the `layers` given."""

    def __init__(
        self,
        arch: Arch,
        weights: Weights,
        ops: Ops,
        cos_sin: torch.Tensor,
        layers: Sequence[DenseLayer] | None = None,
    ) -> None:
        self.cos_sin = cos_sin
        self.scale = arch.head_dim**-0.5
        layers = layers or [
            DenseLayer(
                weights,
                f"layers.{index}",
                ops,
                arch.windows[index],
                build_mlp(arch, weights, f"layers.{index}", ops, index),
            )
            for index in range(arch.num_layers)
        ]
        super().__init__(arch, ops, layers, weights.tensors.get("norm"))

    def pays(self, num_tokens: int) -> bool:
        qkv = self.layers[0].inputs
        return isinstance(qkv, FusedLinear) and qkv.pays(num_tokens)

    def attend(
        self,
        made: torch.Tensor,
        index: int,
        batch: AttentionBatch,
        pool: KVPool,
        attention: Attention,
    ) -> torch.Tensor:
        """made [T, q, k and v] -> [T, q_size]; K and V are in the pool then."""
        arch, layer = self.arch, self.layers[index]
        q = self.ops.rope_write_kv(
            made,
            batch.positions,
            self.cos_sin,
            batch.slots,
            pool.keys(index),
            pool.values(index),
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_dim,
            layer.q_norm,
            layer.k_norm,
            arch.norm_eps,
            pool.k_scale(index),
            pool.v_scale(index),
            attention.wants_new,
        )
        new = self._new_keys(made) if attention.wants_new else None
        x = attention.forward(q, index, pool, scale=self.scale, window=layer.window, new=new)
        return x.reshape(-1, arch.q_size)

    def _new_keys(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This step's K, rotated in place, and V, [T, kv_heads, head_dim] each."""
        arch = self.arch
        heads = qkv.view(len(qkv), -1, arch.head_dim)
        first = arch.num_heads + arch.num_kv_heads
        return heads[:, arch.num_heads : first], heads[:, first:]


class DenseDecoder(StackDecoder):
    def __init__(self, arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> None:
        super().__init__(weights, DenseStack(arch, weights, ops, cos_sin))
