"""MTP: decoder layers that a model brings along, each trained to guess one token further ahead.

    x = proj([norm(f), norm(embedding(t))])    f: the target's final normed state, or what the layer
    f' = norm(layer(x))                        before this one returned
    logits = head(f')                          the target's head

Slot q of a layer's KV pool belongs to token t_q with f of slot q - 1; in slot 0, and where it is not
known, f is zeros. One network is one layer: it is loaded and run by a runner of its own.

The checkpoint format is MiMo's (arXiv 2505.07608): `model.mtp_layers.N.` in the target's own folder,
whose layers are Qwen2's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from kernels.ops import Ops
from srt.config.algorithms import LAYERS_KEY
from srt.layers.parameters import Parameter, Weights, linear, norm
from srt.models.decoder import DenseStack
from srt.models.draft import DraftSource, Lent, as_they_are, check_width
from srt.protocols.attention import AttentionBackend, AttentionBatch
from srt.protocols.kv_pool import KVPool

PREFIX = "model.mtp_layers."


def foreign_tensors(config: dict[str, Any], step: int | None) -> Callable[[str], bool]:
    """Which tensors of a checkpoint are other runners' business. `step`: for the runner of this MTP
    layer all but its own; None: for a whole model the MTP layers that its configuration announces."""
    if step is not None:
        own = f"{PREFIX}{step}."
        return lambda name: not name.startswith(own)
    count = config.get(LAYERS_KEY) or 0
    layers = config.get("num_hidden_layers", 0)  # DeepSeek stores them behind the model's own
    announced = tuple(
        name
        for index in range(count)
        for name in (f"{PREFIX}{index}.", f"model.layers.{layers + index}.")
    )
    return lambda name: name.startswith(announced)


class MtpNetwork:
    """A `srt.models.draft.FeatureNetwork`."""

    token_ids: torch.Tensor | None = None
    fuse = staticmethod(as_they_are)

    def __init__(
        self, source: DraftSource, weights: Weights, ops: Ops, cos_sin: torch.Tensor, lent: Lent
    ) -> None:
        self.feature_size = check_width(source, lent)
        self.taps = (lent.num_layers,)
        self.ops = ops
        self.eps = source.arch.norm_eps
        self.embedding = lent.embedding
        self.head = lent.head
        self.token_norm = weights.tensors["token_norm"]
        self.state_norm = weights.tensors["state_norm"]
        self.join = weights.linears["join"]
        self.stack = DenseStack(source.arch, weights, ops, cos_sin)

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: AttentionBackend,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        norm_of, eps = self.ops.rms_norm, self.eps
        embedded = F.embedding(token_ids, self.embedding)
        parts = norm_of(states, self.state_norm, eps), norm_of(embedded, self.token_norm, eps)
        return self.stack.forward(self.join(torch.cat(parts, dim=1)), batch, pool, attention, keep)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(states)


class Mtp:
    """A `srt.models.draft.DraftFamily`: layer `step` of those the checkpoint has."""

    def __init__(self, step: int) -> None:
        self._step = step

    @staticmethod
    def build(
        source: DraftSource, weights: Weights, ops: Ops, cos_sin: torch.Tensor, lent: Lent
    ) -> MtpNetwork:
        return MtpNetwork(source, weights, ops, cos_sin, lent)

    def parameters(self, source: DraftSource) -> list[Parameter]:
        arch, prefix = source.arch, f"{PREFIX}{self._step}."
        assert arch.num_layers == 1, "one runner, one layer"
        hidden, inner = arch.hidden_size, arch.intermediate_size
        qkv = {"q_proj": arch.q_size, "k_proj": arch.kv_size, "v_proj": arch.kv_size}
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return [
            norm("token_norm", f"{prefix}token_layernorm.weight", hidden),
            norm("state_norm", f"{prefix}hidden_layernorm.weight", hidden),
            linear("join", prefix, {"input_proj": hidden}, 2 * hidden),
            norm("layers.0.input_norm", f"{prefix}input_layernorm.weight", hidden),
            linear("layers.0.qkv", attention, qkv, hidden, bias=True),
            linear("layers.0.out", attention, {"o_proj": hidden}, arch.q_size),
            norm("layers.0.mlp_norm", f"{prefix}post_attention_layernorm.weight", hidden),
            linear("layers.0.gate_up", mlp, {"gate_proj": inner, "up_proj": inner}, hidden),
            linear("layers.0.down", mlp, {"down_proj": hidden}, inner),
            norm("norm", f"{prefix}final_layernorm.weight", hidden),
        ]
