"""Decoder layers whose attention is MLA, see `srt.layers.latent`, and whose MLP may be one of
experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.ops import Ops
from srt.layers.latent import UpProjection
from srt.layers.parameters import Parameter, Weights, linear, norm, tensor
from srt.models.arch import Arch
from srt.models.moe import build_mlp
from srt.models.stack import Stack, StackDecoder, StackLayer
from srt.protocols.attention import Attention, AttentionBatch
from srt.protocols.kv_pool import KVPool

NORM_EPS = 1e-6  # of the latents' own norms, whatever the other norms have


class LatentLayer(StackLayer):
    """`inputs` makes of x what needs no norm in between, side by side: the queries, or their latent, and
    the latent of K and V with the key to be rotated."""

    __slots__ = ("q_norm", "q_up", "kv_norm")

    def __init__(self, weights: Weights, index: int, ops: Ops, arch: Arch) -> None:
        name = f"layers.{index}"
        assert arch.latent is not None
        inputs = "queries" if arch.latent.q_rank is None else "latents"
        mlp = build_mlp(arch, weights, name, ops, index)
        super().__init__(weights, name, weights.linears[f"{name}.{inputs}"], mlp)
        self.q_norm = weights.tensors.get(f"{name}.q_norm")
        self.q_up = weights.linears.get(f"{name}.q_up")
        self.kv_norm = weights.tensors[f"{name}.kv_norm"]


class LatentStack(Stack[LatentLayer]):
    def __init__(self, arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> None:
        assert arch.latent is not None
        self.latent = arch.latent
        self.cos_sin = cos_sin
        layers = [LatentLayer(weights, i, ops, arch) for i in range(arch.num_layers)]
        super().__init__(arch, ops, layers, weights.tensors["norm"])

    def attend(
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


class LatentDecoder(StackDecoder):
    """`ups`: of every layer, for the attention."""

    def __init__(self, arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> None:
        stack = LatentStack(arch, weights, ops, cos_sin)
        super().__init__(weights, stack)
        self.ups = [
            UpProjection(weights.tensors[f"layers.{i}.kv_up"], stack.latent)
            for i in range(arch.num_layers)
        ]


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
