"""Qwen3 with experts: the attention of Qwen3, mixtures of experts in most layers (arXiv 2505.09388)."""

from __future__ import annotations

import torch

from kernels.ops import Ops
from srt.layers.parameters import Parameter, Weights, head, linear, norm, tensor
from srt.models.arch import Arch
from srt.models.decoder import DenseDecoder
from srt.models.moe import moe_parameters


class Qwen3Moe:
    """A `srt.models.blocks.Family`."""

    @staticmethod
    def build(arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> DenseDecoder:
        return DenseDecoder(arch, weights, ops, cos_sin)

    @staticmethod
    def parameters(arch: Arch) -> list[Parameter]:
        hidden, inner, moe = arch.hidden_size, arch.intermediate_size, arch.moe
        assert moe is not None
        qkv = {"q_proj": arch.q_size, "k_proj": arch.kv_size, "v_proj": arch.kv_size}
        embedding = "model.embed_tokens.weight"
        found = [tensor("embedding", embedding, arch.vocab_size, hidden)]
        for i in range(arch.num_layers):
            name, source = f"layers.{i}", f"model.layers.{i}."
            attention, mlp = f"{source}self_attn.", f"{source}mlp."
            bias = arch.attention_bias
            found += [
                norm(f"{name}.input_norm", f"{source}input_layernorm.weight", hidden),
                linear(f"{name}.qkv", attention, qkv, hidden, bias=bias),
                norm(f"{name}.q_norm", f"{attention}q_norm.weight", arch.head_dim),
                norm(f"{name}.k_norm", f"{attention}k_norm.weight", arch.head_dim),
                linear(f"{name}.out", attention, {"o_proj": hidden}, arch.q_size, bias=bias),
                norm(f"{name}.mlp_norm", f"{source}post_attention_layernorm.weight", hidden),
            ]
            if i in moe.layers:
                found += moe_parameters(name, mlp, hidden, moe)
            else:
                found += [
                    linear(f"{name}.gate_up", mlp, {"gate_proj": inner, "up_proj": inner}, hidden),
                    linear(f"{name}.down", mlp, {"down_proj": hidden}, inner),
                ]
        found.append(norm("norm", "model.norm.weight", hidden))
        found.append(head("head", embedding, arch.vocab_size, hidden, tied=arch.tied))
        return found
