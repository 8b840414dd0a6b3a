"""Qwen2, Qwen2.5 and MiMo, dense: like Llama, with biases on q, k and v, and windows on some layers.

What MiMo brings beyond that, its MTP layers, is a draft's: `srt.models.mtp`.
"""

from __future__ import annotations

import torch

from kernels.ops import Ops
from srt.layers.parameters import Parameter, Weights, head, linear, norm, tensor
from srt.models.arch import Arch
from srt.models.decoder import DenseDecoder


class Qwen2:
    """A `srt.models.blocks.Family`."""

    @staticmethod
    def build(arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> DenseDecoder:
        return DenseDecoder(arch, weights, ops, cos_sin)

    @staticmethod
    def parameters(arch: Arch) -> list[Parameter]:
        hidden, inner = arch.hidden_size, arch.intermediate_size
        qkv = {"q_proj": arch.q_size, "k_proj": arch.kv_size, "v_proj": arch.kv_size}
        embedding = "model.embed_tokens.weight"
        found = [tensor("embedding", embedding, arch.vocab_size, hidden)]
        for i in range(arch.num_layers):
            name, source = f"layers.{i}", f"model.layers.{i}."
            attention, mlp = f"{source}self_attn.", f"{source}mlp."
            gate_up = {"gate_proj": inner, "up_proj": inner}
            found += [
                norm(f"{name}.input_norm", f"{source}input_layernorm.weight", hidden),
                linear(f"{name}.qkv", attention, qkv, hidden, bias=True),
                linear(f"{name}.out", attention, {"o_proj": hidden}, arch.q_size),
                norm(f"{name}.mlp_norm", f"{source}post_attention_layernorm.weight", hidden),
                linear(f"{name}.gate_up", mlp, gate_up, hidden),
                linear(f"{name}.down", mlp, {"down_proj": hidden}, inner),
            ]
        found.append(norm("norm", "model.norm.weight", hidden))
        found.append(head("head", embedding, arch.vocab_size, hidden, tied=arch.tied))
        return found
