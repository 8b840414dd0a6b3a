"""DeepSeek V2 and V3: MLA, experts in all layers but the first few (arXiv 2405.04434, 2412.19437).

They differ in how tokens choose their experts, which is `Arch.moe`'s; the MTP layer that V3 brings
behind its last layer is no part of the model.
"""

from __future__ import annotations

import torch

from kernels.ops import Ops
from srt.layers.parameters import Parameter, Weights, head, linear, norm, tensor
from srt.models.arch import Arch
from srt.models.mla import LatentDecoder, attention_parameters
from srt.models.moe import moe_parameters


class Deepseek:
    """A `srt.models.blocks.Family`."""

    @staticmethod
    def build(arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> LatentDecoder:
        return LatentDecoder(arch, weights, ops, cos_sin)

    @staticmethod
    def parameters(arch: Arch) -> list[Parameter]:
        hidden, inner, moe = arch.hidden_size, arch.intermediate_size, arch.moe
        assert moe is not None
        embedding = "model.embed_tokens.weight"
        found = [tensor("embedding", embedding, arch.vocab_size, hidden)]
        for i in range(arch.num_layers):
            name, source = f"layers.{i}", f"model.layers.{i}."
            mlp = f"{source}mlp."
            found += [
                norm(f"{name}.input_norm", f"{source}input_layernorm.weight", hidden),
                *attention_parameters(name, f"{source}self_attn.", arch),
                norm(f"{name}.mlp_norm", f"{source}post_attention_layernorm.weight", hidden),
            ]
            if i in moe.layers:
                found += moe_parameters(name, mlp, hidden, moe)
            else:
                bias, sizes = arch.mlp_bias, {"gate_proj": inner, "up_proj": inner}
                found += [
                    linear(f"{name}.gate_up", mlp, sizes, hidden, bias=bias),
                    linear(f"{name}.down", mlp, {"down_proj": hidden}, inner, bias=bias),
                ]
        found.append(norm("norm", "model.norm.weight", hidden))
        found.append(head("head", embedding, arch.vocab_size, hidden, tied=arch.tied))
        return found
