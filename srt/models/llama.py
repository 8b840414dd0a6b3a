"""Llama 2 and 3, SmolLM2, Mistral: grouped-query attention, gated MLP, one norm before each.

Mistral differs by its sliding window, which is a number in `Arch`.
"""

from __future__ import annotations

import torch

from kernels.ops import Ops
from srt.layers.parameters import Parameter, Weights, head, linear, norm, tensor
from srt.models.arch import Arch
from srt.models.decoder import DenseDecoder


class Llama:
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
            bias, mlp_bias = arch.attention_bias, arch.mlp_bias
            gate_up = {"gate_proj": inner, "up_proj": inner}
            found += [
                norm(f"{name}.input_norm", f"{source}input_layernorm.weight", hidden),
                linear(f"{name}.qkv", attention, qkv, hidden, bias=bias),
                linear(f"{name}.out", attention, {"o_proj": hidden}, arch.q_size, bias=bias),
                norm(f"{name}.mlp_norm", f"{source}post_attention_layernorm.weight", hidden),
                linear(f"{name}.gate_up", mlp, gate_up, hidden, bias=mlp_bias),
                linear(f"{name}.down", mlp, {"down_proj": hidden}, inner, bias=mlp_bias),
            ]
        found.append(norm("norm", "model.norm.weight", hidden))
        found.append(head("head", embedding, arch.vocab_size, hidden, tied=arch.tied))
        return found
