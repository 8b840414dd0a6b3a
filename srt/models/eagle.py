"""EAGLE's network: decoder layers over the target's final hidden state and the next token's embedding.

    x = fc([embedding(t), f])    f: what the target's head was given at the position before
    f' = layers(x)               stands in for f at the next place, which has no such state yet
    logits = head(f')            the target's head, if the draft has none of its own

The first layer has no norm before its attention, and no norm follows the last. f is the state behind the
target's final norm: what the public drafts were trained on (arXiv 2401.15077, `hidden_states[-1]` of
their targets). Slots are EAGLE-3's: slot q belongs to token t_q with f of position q - 1, or zeros.

The checkpoint format is that of the public EAGLE drafts, version 1 and 2. Their config.json often calls
them by the name of the whole model whose layers theirs are like; biases, an embedding and a head are
used if they are stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.ops import Ops
from srt.errors import ConfigError
from srt.layers.parameters import Parameter, Weights, linear, norm, tensor
from srt.models.decoder import DenseStack
from srt.models.draft import DraftSource, Lent, as_they_are, check_width
from srt.protocols.attention import AttentionBackend, AttentionBatch
from srt.protocols.kv_pool import KVPool


class EagleNetwork:
    """A `srt.models.draft.FeatureNetwork`."""

    token_ids: torch.Tensor | None = None
    fuse = staticmethod(as_they_are)

    def __init__(
        self, source: DraftSource, weights: Weights, ops: Ops, cos_sin: torch.Tensor, lent: Lent
    ) -> None:
        self.feature_size = check_width(source, lent)
        self.taps = (lent.num_layers,)
        self.embedding = weights.tensors.get("embedding", lent.embedding)
        self.join = weights.linears["join"]
        self.stack = DenseStack(source.arch, weights, ops, cos_sin)
        self.head = weights.linears.get("head", lent.head)

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: AttentionBackend,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        embedded = F.embedding(token_ids, self.embedding)
        x = self.join(torch.cat((embedded, states), dim=1))
        return self.stack.forward(x, batch, pool, attention, keep)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(states)


class Eagle:
    """A `srt.models.draft.DraftFamily`."""

    @staticmethod
    def build(
        source: DraftSource, weights: Weights, ops: Ops, cos_sin: torch.Tensor, lent: Lent
    ) -> EagleNetwork:
        return EagleNetwork(source, weights, ops, cos_sin, lent)

    @staticmethod
    def parameters(source: DraftSource) -> list[Parameter]:
        """Raises ConfigError for a checkpoint that is a whole model."""
        arch, stored = source.arch, source.stored
        if stored and "fc.weight" not in stored:
            raise ConfigError(
                f"the draft ({arch.name}) has no fc.weight, so it is no EAGLE draft; a whole model "
                "guesses with --speculative-algorithm standalone"
            )
        hidden, inner = arch.hidden_size, arch.intermediate_size
        qkv = {"q_proj": arch.q_size, "k_proj": arch.kv_size, "v_proj": arch.kv_size}
        gate_up = {"gate_proj": inner, "up_proj": inner}
        found = [linear("join", "", {"fc": hidden}, 2 * hidden, bias="fc.bias" in stored)]
        for i in range(arch.num_layers):
            name, prefix = f"layers.{i}", f"layers.{i}."
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            has_bias, out_bias = f"{attention}q_proj.bias", f"{attention}o_proj.bias"
            if i > 0:
                found.append(norm(f"{name}.input_norm", f"{prefix}input_layernorm.weight", hidden))
            found += [
                linear(f"{name}.qkv", attention, qkv, hidden, bias=has_bias in stored),
                linear(
                    f"{name}.out",
                    attention,
                    {"o_proj": hidden},
                    arch.q_size,
                    bias=out_bias in stored,
                ),
                norm(f"{name}.mlp_norm", f"{prefix}post_attention_layernorm.weight", hidden),
                linear(f"{name}.gate_up", mlp, gate_up, hidden),
                linear(f"{name}.down", mlp, {"down_proj": hidden}, inner),
            ]
        if "lm_head.weight" in stored:
            found.append(linear("head", "", {"lm_head": arch.vocab_size}, hidden))
        if "embed_tokens.weight" in stored:
            found.append(tensor("embedding", "embed_tokens.weight", arch.vocab_size, hidden))
        return found
