"""The decoder that most families share: grouped-query attention, gated MLP or a mixture of them, one
norm before each.

Families differ in what fills it, their weight maps, and in numbers of `Arch`; a norm of q and k heads is
there when the weight map has one. A family that computes anything else brings its own model. Draft
networks whose layers are such layers have the same stack of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.linear import AddingLinear, FusedLinear
from kernels.ops import Ops
from srt.layers.parameters import Weights
from srt.models.arch import Arch
from srt.models.blocks import GatedMlp, Mlp, Taps
from srt.models.moe import build_mlp
from srt.protocols.attention import Attention, AttentionBatch
from srt.protocols.kv_pool import KVPool


class DenseLayer:
    """One decoder layer. The norm that follows the MLP is the next layer's, applied with the sum.
    `q_norm` and `k_norm` are there if the family has them; a draft's first layer has no `input_norm`.
    `mlp`: another than the usual one."""

    __slots__ = ("qkv", "q_norm", "k_norm", "out", "mlp", "input_norm", "mlp_norm", "window")

    def __init__(
        self,
        weights: Weights,
        name: str,
        ops: Ops,
        window: int | None,
        mlp: Mlp | None = None,
    ) -> None:
        self.qkv = self.project(weights, name)
        self.q_norm = weights.tensors.get(f"{name}.q_norm")
        self.k_norm = weights.tensors.get(f"{name}.k_norm")
        self.out = weights.linears[f"{name}.out"]
        self.mlp: Mlp = mlp or GatedMlp(weights, name, ops)
        self.input_norm = weights.tensors.get(f"{name}.input_norm")
        self.mlp_norm = weights.tensors[f"{name}.mlp_norm"]
        self.window = window

    @property
    def is_fused(self) -> bool:
        """Whether its linears can take in what stands before and behind them."""
        attention = isinstance(self.qkv, FusedLinear) and isinstance(self.out, AddingLinear)
        return self.mlp.is_fused and attention

    def project(self, weights: Weights, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """What makes q, k and v side by side of x [T, H]."""
        return weights.linears[f"{name}.qkv"]


class DenseStack:
    """The layers one after the other, `layers.0` and on, and the norm behind them, if there is one.
    `layers`: others than the usual ones."""

    def __init__(
        self,
        arch: Arch,
        weights: Weights,
        ops: Ops,
        cos_sin: torch.Tensor,
        layers: Sequence[DenseLayer] | None = None,
    ) -> None:
        self.arch = arch
        self.ops = ops
        self.cos_sin = cos_sin
        self.scale = arch.head_dim**-0.5
        self.layers = layers or [
            DenseLayer(
                weights,
                f"layers.{index}",
                ops,
                arch.windows[index],
                build_mlp(arch, weights, f"layers.{index}", ops, index),
            )
            for index in range(arch.num_layers)
        ]
        norms = [layer.input_norm for layer in self.layers]
        assert all(norm is not None for norm in norms[1:])
        self.norms = [*norms, weights.tensors.get("norm")]  # each applied before the layer it leads
        self.is_fused = all(layer.is_fused for layer in self.layers)

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
        if self.is_fused and self._pays(len(residual)):
            return self._forward_fused(residual, batch, pool, attention, keep, taps)
        arch, ops, eps, norms = self.arch, self.ops, self.arch.norm_eps, self.norms
        first = norms[0]
        x = residual if first is None else ops.rms_norm(residual, first, eps)
        last = arch.num_layers - 1
        early = last if taps is None or arch.num_layers not in taps.layers else -1
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.take(index, residual)
            x = self._attend(layer.qkv(x), index, batch, pool, attention)
            if index == early and keep is not None:  # nothing below mixes tokens any more
                x, residual = x[keep], residual[keep]
            x, residual = ops.add_rms_norm(layer.out(x), residual, layer.mlp_norm, eps)
            following = norms[index + 1]
            if following is None:
                x = residual + layer.mlp(x)
            else:
                x, residual = ops.add_rms_norm(layer.mlp(x), residual, following, eps)
        if taps is not None:
            taps.take(arch.num_layers, x)
        return x if early == last or keep is None else x[keep]

    def _pays(self, num_tokens: int) -> bool:
        qkv = self.layers[0].qkv
        return isinstance(qkv, FusedLinear) and qkv.pays(num_tokens)

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
        arch, eps = self.arch, self.arch.norm_eps
        last = arch.num_layers - 1
        early = last if taps is None or arch.num_layers not in taps.layers else -1
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=False)):
            if taps is not None:
                taps.take(index, stream)
            assert isinstance(layer.qkv, FusedLinear) and isinstance(layer.out, AddingLinear)
            qkv = layer.qkv(stream) if norm is None else layer.qkv.normed(stream, norm, eps)
            x = self._attend(qkv, index, batch, pool, attention)
            if index == early and keep is not None:
                x, stream = x[keep], stream[keep]
            stream = layer.out.added(x, stream)
            stream = layer.mlp.add_normed(stream, layer.mlp_norm, eps)
        final = self.norms[-1]
        x = stream if final is None else self.ops.rms_norm(stream, final, eps)
        if taps is not None:
            taps.take(arch.num_layers, x)
        return x if early == last or keep is None else x[keep]

    def _attend(
        self,
        qkv: torch.Tensor,
        index: int,
        batch: AttentionBatch,
        pool: KVPool,
        attention: Attention,
    ) -> torch.Tensor:
        """What layer `index`'s heads gather, side by side, [T, q_size]."""
        arch, layer = self.arch, self.layers[index]
        q = self.ops.rope_write_kv(
            qkv,
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
        new = self._new_keys(qkv) if attention.wants_new else None
        x = attention.forward(q, index, pool, scale=self.scale, window=layer.window, new=new)
        return x.reshape(-1, arch.q_size)

    def _new_keys(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This step's K, rotated in place, and V, [T, kv_heads, head_dim] each."""
        arch = self.arch
        heads = qkv.view(len(qkv), -1, arch.head_dim)
        first = arch.num_heads + arch.num_kv_heads
        return heads[:, arch.num_heads : first], heads[:, first:]


class DenseDecoder:
    """See `srt.models.blocks.CausalModel` for the contract."""

    def __init__(self, arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> None:
        self.embedding = weights.tensors["embedding"]
        self.head = weights.linears["head"]
        self.stack = DenseStack(arch, weights, ops, cos_sin)

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
