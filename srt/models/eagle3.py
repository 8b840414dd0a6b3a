"""EAGLE-3's network: one decoder layer over the target's features and the embedding of the next token.

    f = fc(features)                    [H <- taps * target H], for tokens the target has computed
    x = [norm(embedding(t)), norm(f)]   [2H], the layer's input; f is also the residual
    f' = f + attention(x) + mlp(...)    stands in for f at the next place, which has no features yet
    logits = head(norm(f'))             over the draft's vocabulary, the target's most frequent tokens

Slot q of its KV pool belongs to token t_q with the feature of position q - 1; slot 0 has a feature of
zeros. So what a slot holds depends on the tokens up to its own, and prefixes can be shared.

The checkpoint format is that of the public EAGLE-3 drafts (arXiv 2503.01840); without `lm_head.weight`
the target's head is used, of which the draft needs the rows of its vocabulary only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kernels.ops import Ops
from srt.errors import ConfigError
from srt.layers.parameters import Parameter, Part, Weights, linear, norm, tensor
from srt.models.blocks import GatedMlp
from srt.models.draft import DraftSource, Lent, check_width
from srt.protocols.attention import AttentionBackend, AttentionBatch
from srt.protocols.kv_pool import KVPool

LAYER = "midlayer"
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
NUM_TAPS = 3  # low, middle and high, unless the draft's configuration names others


def named_layers(config: dict[str, Any]) -> list[int] | None:
    """The layers that the draft's configuration asks for, if it does."""
    return (config.get("eagle_config") or {}).get(TAPS_KEY) or config.get(TAPS_KEY)


def tap_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The target's layers whose entering streams are the features."""
    usual = (2, num_layers // 2, num_layers - 3)
    layers = tuple(int(layer) for layer in named_layers(config) or usual)
    if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] > num_layers:
        raise ConfigError(
            f"the draft reads the target's layers {list(layers)}; they must ascend within 0 to "
            f"{num_layers}, the target's number of layers ({TAPS_KEY} in the draft's config.json)"
        )
    return layers


class Eagle3Network:
    """A `srt.models.draft.FeatureNetwork`."""

    def __init__(
        self, source: DraftSource, weights: Weights, ops: Ops, cos_sin: torch.Tensor, lent: Lent
    ) -> None:
        width = check_width(source, lent)
        arch = source.arch
        self.arch = arch
        self.ops = ops
        self.cos_sin = cos_sin
        self.scale = arch.head_dim**-0.5
        self.taps = tap_layers(source.config, lent.num_layers)
        self.embedding = weights.tensors.get("embedding", lent.embedding)
        self.fuse = weights.linears["fuse"]
        self.qkv = weights.linears["qkv"]
        self.out = weights.linears["out"]
        self.mlp = GatedMlp(weights, "layer", ops)
        self.token_norm = weights.tensors["token_norm"]
        self.state_norm = weights.tensors["state_norm"]
        self.mlp_norm = weights.tensors["mlp_norm"]
        self.final_norm = weights.tensors["norm"]
        self.feature_size = width * len(self.taps)
        offsets = weights.tensors.get("offsets")
        self.token_ids: torch.Tensor | None = None  # [D] int64, of the target; None: all, in order
        if offsets is not None:
            self.token_ids = offsets.long() + torch.arange(len(offsets), device=offsets.device)
        head = weights.linears.get("head")
        if head is None and self.token_ids is None:
            head = lent.head
        elif head is None and self.token_ids is not None:
            rows = lent.head_rows(self.token_ids).to(self.final_norm.dtype)
            head = ops.pack_linear(
                rows, None, quantization=source.quantization, out_dtype=torch.float32
            )
        assert head is not None
        self.head = head

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: AttentionBackend,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        arch, ops, eps = self.arch, self.ops, self.arch.norm_eps
        embedded = F.embedding(token_ids, self.embedding)
        x = torch.cat(
            (
                ops.rms_norm(embedded, self.token_norm, eps),
                ops.rms_norm(states, self.state_norm, eps),
            ),
            dim=1,
        )
        q = ops.rope_write_kv(
            self.qkv(x),
            batch.positions,
            self.cos_sin,
            batch.slots,
            pool.keys(0),
            pool.values(0),
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_dim,
            None,
            None,
            eps,
            pool.k_scale(0),
            pool.v_scale(0),
        )
        x = attention.forward(q, 0, pool, scale=self.scale, window=None)
        x = x.reshape(-1, arch.q_size)
        if keep is not None:
            x, states = x[keep], states[keep]
        x, residual = ops.add_rms_norm(self.out(x), states, self.mlp_norm, eps)
        return residual + self.mlp(x)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(self.ops.rms_norm(states, self.final_norm, self.arch.norm_eps))


class Eagle3:
    """A `srt.models.draft.DraftFamily`."""

    @staticmethod
    def build(
        source: DraftSource, weights: Weights, ops: Ops, cos_sin: torch.Tensor, lent: Lent
    ) -> Eagle3Network:
        return Eagle3Network(source, weights, ops, cos_sin, lent)

    @staticmethod
    def parameters(source: DraftSource) -> list[Parameter]:
        arch, config = source.arch, source.config
        hidden, inner = arch.hidden_size, arch.intermediate_size
        width = int(config.get("target_hidden_size", hidden))
        num_taps = len(named_layers(config) or ()) or NUM_TAPS
        num_tokens = int(config.get("draft_vocab_size") or arch.vocab_size)
        attention, mlp = f"{LAYER}.self_attn.", f"{LAYER}.mlp."
        qkv = {"q_proj": arch.q_size, "k_proj": arch.kv_size, "v_proj": arch.kv_size}
        found = [
            linear("fuse", "", {"fc": hidden}, num_taps * width),
            norm("token_norm", f"{LAYER}.input_layernorm.weight", hidden),
            norm("state_norm", f"{LAYER}.hidden_norm.weight", hidden),
            linear("qkv", attention, qkv, 2 * hidden),
            linear("out", attention, {"o_proj": hidden}, arch.q_size),
            norm("mlp_norm", f"{LAYER}.post_attention_layernorm.weight", hidden),
            linear("layer.gate_up", mlp, {"gate_proj": inner, "up_proj": inner}, hidden),
            linear("layer.down", mlp, {"down_proj": hidden}, inner),
            norm("norm", "norm.weight", hidden),
        ]
        if num_tokens != arch.vocab_size or "d2t" in source.stored:
            part = Part(source="d2t", shape=(num_tokens,))
            found.append(Parameter(name="offsets", kind="index", parts=(part,)))
        if "t2d" in source.stored:  # says the same as d2t
            part = Part(source="t2d", shape=(arch.vocab_size,))
            found.append(Parameter(name="known", kind="index", parts=(part,)))
        if "lm_head.weight" in source.stored:
            found.append(linear("head", "", {"lm_head": num_tokens}, hidden))
        if "embed_tokens.weight" in source.stored:
            found.append(tensor("embedding", "embed_tokens.weight", arch.vocab_size, width))
        return found
