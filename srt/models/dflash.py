"""DFLASH's network: a stack of Qwen3 layers that fills in a block of masks at once.

    context   c_p = norm(fc(features of position p))             [H <- taps * H], once per position
    block     x_0 = embedding([last token, mask, mask, ...])
    layer     q of the block only; k and v of c and of the block: both go through the same k_proj, v_proj
    logits    head(norm(x_L)), embedding and head being the target's

Slot p of its KV pool holds, in every layer, k and v of c_p: no draft token's state outlives its block.
What a slot holds depends on the tokens up to its own, so prefixes can be shared. The checkpoint format
is that of the public DFlash drafts (arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.ops import Ops
from srt.config.block_draft import BlockDraft, check_target, read_block_draft
from srt.layers.parameters import Parameter, Weights, linear, norm, tensor
from srt.models.decoder import DenseLayer, DenseStack
from srt.models.draft import DraftSource, Lent
from srt.protocols.attention import AttentionBackend, AttentionBatch
from srt.protocols.kv_pool import KVPool


class BlockLayer(DenseLayer):
    """q has a linear of its own, for the context needs none."""

    __slots__ = ("q", "kv")

    def project(self, weights: Weights, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        self.q = weights.linears[f"{name}.q"]
        self.kv = weights.linears[f"{name}.kv"]
        return lambda x: torch.cat((self.q(x), self.kv(x)), dim=1)


class BlockNetwork:
    """T tokens, K of them kept, F = len(taps) * H, V vocabulary."""

    def __init__(
        self, source: DraftSource, weights: Weights, ops: Ops, cos_sin: torch.Tensor, lent: Lent
    ) -> None:
        arch = source.arch
        self.shape = shape_of(source)
        check_target(
            self.shape,
            source.config,
            name=arch.name,
            width=arch.hidden_size,
            hidden_size=lent.hidden_size,
            num_layers=lent.num_layers,
        )
        self.arch = arch
        self.ops = ops
        self.cos_sin = cos_sin
        self.taps = self.shape.taps
        self.fuse = weights.linears["fuse"]
        self.context_norm = weights.tensors["context_norm"]
        self.layers = [
            BlockLayer(weights, f"layers.{index}", ops, arch.windows[index])
            for index in range(arch.num_layers)
        ]
        self.stack = DenseStack(arch, weights, ops, cos_sin, self.layers)
        self.embedding = weights.tensors.get("embedding", lent.embedding)
        self.head = weights.linears.get("head", lent.head)

    def inject(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, pool: KVPool
    ) -> None:
        """features [T, F] become the context of their positions: K and V of all layers."""
        arch, eps = self.arch, self.arch.norm_eps
        context = self.ops.rms_norm(self.fuse(features), self.context_norm, eps)
        for index, layer in enumerate(self.layers):
            self.ops.rope_write_kv(
                layer.kv(context),
                positions,
                self.cos_sin,
                slots,
                pool.keys(index),
                pool.values(index),
                0,
                arch.num_kv_heads,
                arch.head_dim,
                layer.q_norm,
                layer.k_norm,
                eps,
                pool.k_scale(index),
                pool.v_scale(index),
            )

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: AttentionBackend,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """token_ids [T] int64 of blocks, behind contexts that are there. Returns the normed states of
        those kept, [K, H]. K and V of the blocks stay in their slots, for the next to overwrite."""
        embedded = F.embedding(token_ids, self.embedding)
        return self.stack.forward(embedded, batch, pool, attention, keep)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[K, H] -> [K, V] float32."""
        return self.head(states)


def shape_of(source: DraftSource) -> BlockDraft:
    arch = source.arch
    return read_block_draft(
        arch.name,
        source.config,
        name=arch.name,
        vocab_size=arch.vocab_size,
        num_layers=arch.num_layers,
    )


def backbone_parameters(source: DraftSource) -> list[Parameter]:
    arch = source.arch
    hidden, inner, bias = arch.hidden_size, arch.intermediate_size, arch.attention_bias
    num_taps = len(shape_of(source).taps)
    found = [
        linear("fuse", "", {"fc": hidden}, num_taps * hidden),
        norm("context_norm", "hidden_norm.weight", hidden),
        norm("norm", "norm.weight", hidden),
    ]
    for i in range(arch.num_layers):
        name = f"layers.{i}"
        attention, mlp = f"{name}.self_attn.", f"{name}.mlp."
        kv = {"k_proj": arch.kv_size, "v_proj": arch.kv_size}
        found += [
            norm(f"{name}.input_norm", f"{name}.input_layernorm.weight", hidden),
            linear(f"{name}.q", attention, {"q_proj": arch.q_size}, hidden, bias=bias),
            linear(f"{name}.kv", attention, kv, hidden, bias=bias),
            norm(f"{name}.q_norm", f"{attention}q_norm.weight", arch.head_dim),
            norm(f"{name}.k_norm", f"{attention}k_norm.weight", arch.head_dim),
            linear(f"{name}.out", attention, {"o_proj": hidden}, arch.q_size, bias=bias),
            norm(f"{name}.mlp_norm", f"{name}.post_attention_layernorm.weight", hidden),
            linear(f"{name}.gate_up", mlp, {"gate_proj": inner, "up_proj": inner}, hidden),
            linear(f"{name}.down", mlp, {"down_proj": hidden}, inner),
        ]
    if "lm_head.weight" in source.stored:
        found.append(linear("head", "", {"lm_head": arch.vocab_size}, hidden))
    if "embed_tokens.weight" in source.stored:
        found.append(tensor("embedding", "embed_tokens.weight", arch.vocab_size, hidden))
    return found


class Dflash:
    """A `srt.models.draft.DraftFamily`."""

    @staticmethod
    def build(
        source: DraftSource, weights: Weights, ops: Ops, cos_sin: torch.Tensor, lent: Lent
    ) -> BlockNetwork:
        return BlockNetwork(source, weights, ops, cos_sin, lent)

    @staticmethod
    def parameters(source: DraftSource) -> list[Parameter]:
        return backbone_parameters(source)
