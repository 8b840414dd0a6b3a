"""Decoder layers whose attention is MLA, see `srt.layers.latent`, and whose MLP may be one of
experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.linear import AddingLinear, FusedLinear
from kernels.ops import Ops
from srt.layers.latent import UpProjection
from srt.layers.parameters import Parameter, Weights, linear, norm, tensor
from srt.models.arch import Arch
from srt.models.blocks import Taps
from srt.models.moe import build_mlp
from srt.protocols.attention import Attention, AttentionBatch
from srt.protocols.kv_pool import KVPool

NORM_EPS = 1e-6  # of the latents' own norms, whatever the other norms have


class LatentLayer:
    """`inputs` makes of x what needs no norm in between, side by side: the queries, or their latent, and
    the latent of K and V with the key to be rotated."""

    __slots__ = ("inputs", "q_norm", "q_up", "kv_norm", "out", "mlp", "input_norm", "mlp_norm")

    def __init__(self, weights: Weights, index: int, ops: Ops, arch: Arch) -> None:
        name = f"layers.{index}"
        assert arch.latent is not None
        inputs = "queries" if arch.latent.q_rank is None else "latents"
        self.inputs = weights.linears[f"{name}.{inputs}"]
        self.q_norm = weights.tensors.get(f"{name}.q_norm")
        self.q_up = weights.linears.get(f"{name}.q_up")
        self.kv_norm = weights.tensors[f"{name}.kv_norm"]
        self.out = weights.linears[f"{name}.out"]
        self.mlp = build_mlp(arch, weights, name, ops, index)
        self.input_norm = weights.tensors[f"{name}.input_norm"]
        self.mlp_norm = weights.tensors[f"{name}.mlp_norm"]

    @property
    def is_fused(self) -> bool:
        """Whether its linears can take in what stands before and behind them."""
        attention = isinstance(self.inputs, FusedLinear) and isinstance(self.out, AddingLinear)
        return self.mlp.is_fused and attention


class LatentDecoder:
    """See `srt.models.blocks.CausalModel` for the contract. `ups`: of every layer, for the attention."""

    def __init__(self, arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> None:
        assert arch.latent is not None
        self.arch = arch
        self.latent = arch.latent
        self.ops = ops
        self.cos_sin = cos_sin
        self.embedding = weights.tensors["embedding"]
        self.head = weights.linears["head"]
        self.layers = [LatentLayer(weights, i, ops, arch) for i in range(arch.num_layers)]
        self.ups = [
            UpProjection(weights.tensors[f"layers.{i}.kv_up"], self.latent)
            for i in range(arch.num_layers)
        ]
        norms = [layer.input_norm for layer in self.layers]
        self.norms = [*norms, weights.tensors["norm"]]
        self.is_fused = all(layer.is_fused for layer in self.layers)

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: Attention,
        keep: torch.Tensor | None,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        arch, ops, eps = self.arch, self.ops, self.arch.norm_eps
        residual = ops.embed(token_ids, self.embedding)
        if self.is_fused:
            return self._forward_fused(residual, batch, pool, attention, keep, taps)
        x = ops.rms_norm(residual, self.norms[0], eps)
        last = arch.num_layers - 1
        early = last if taps is None or arch.num_layers not in taps.layers else -1
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.take(index, residual)
            x = self._attend(layer.inputs(x), index, batch, pool, attention)
            if index == early and keep is not None:  # nothing below mixes tokens any more
                x, residual = x[keep], residual[keep]
            x, residual = ops.add_rms_norm(layer.out(x), residual, layer.mlp_norm, eps)
            x, residual = ops.add_rms_norm(layer.mlp(x), residual, self.norms[index + 1], eps)
        if taps is not None:
            taps.take(arch.num_layers, x)
        return x if early == last or keep is None else x[keep]

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
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.take(index, stream)
            assert isinstance(layer.inputs, FusedLinear) and isinstance(layer.out, AddingLinear)
            made = layer.inputs.normed(stream, layer.input_norm, eps)
            x = self._attend(made, index, batch, pool, attention)
            if index == early and keep is not None:
                x, stream = x[keep], stream[keep]
            stream = layer.out.added(x, stream)
            stream = layer.mlp.add_normed(stream, layer.mlp_norm, eps)
        x = self.ops.rms_norm(stream, self.norms[-1], eps)
        if taps is not None:
            taps.take(arch.num_layers, x)
        return x if early == last or keep is None else x[keep]

    def _attend(
        self,
        made: torch.Tensor,
        index: int,
        batch: AttentionBatch,
        pool: KVPool,
        attention: Attention,
    ) -> torch.Tensor:
        """made [T, q and latent] -> [T, heads * value]; the tokens' latents are in the pool then."""
        layer, arch, latent = self.layers[index], self.arch, self.latent
        q, latents = made[:, : -latent.width], made[:, -latent.width :]
        if layer.q_up is not None:
            assert layer.q_norm is not None
            q = layer.q_up(self.ops.rms_norm(q.contiguous(), layer.q_norm, NORM_EPS))
        heads = q.view(len(q), arch.num_heads, latent.query)
        self.ops.write_latent(
            heads,
            latents,
            layer.kv_norm,
            batch.positions,
            self.cos_sin,
            batch.slots,
            pool.keys(index),
            NORM_EPS,
            latent.interleaved,
        )
        out = attention.forward(heads, index, pool, scale=latent.scale, window=None)
        return out.view(len(out), -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


def attention_parameters(name: str, source: str, arch: Arch) -> list[Parameter]:
    """The weight map of one layer's attention, whose tensors stand under `source`."""
    latent, hidden, bias = arch.latent, arch.hidden_size, arch.attention_bias
    assert latent is not None
    down = {"kv_a_proj_with_mqa": latent.width}
    found = []
    if latent.q_rank is None:
        found.append(linear(f"{name}.queries", source, {"q_proj": arch.q_size} | down, hidden))
    else:
        rank = latent.q_rank
        found += [
            linear(f"{name}.latents", source, {"q_a_proj": rank} | down, hidden, bias=bias),
            norm(f"{name}.q_norm", f"{source}q_a_layernorm.weight", rank),
            linear(f"{name}.q_up", source, {"q_b_proj": arch.q_size}, rank),
        ]
    rows_of_head = latent.nope + latent.value
    up = tensor(
        f"{name}.kv_up", f"{source}kv_b_proj.weight", arch.num_heads * rows_of_head, latent.rank
    )
    values = arch.num_heads * latent.value
    return [
        *found,
        norm(f"{name}.kv_norm", f"{source}kv_a_layernorm.weight", latent.rank),
        replace(up, rows_of_head=rows_of_head),
        linear(f"{name}.out", source, {"o_proj": hidden}, values, bias=bias),
    ]
