"""Mixtral: Mistral with a mixture of experts in every layer (arXiv 2401.04088)."""

from __future__ import annotations

import torch

from kernels.ops import Ops
from srt.layers.parameters import Parameter, Weights, head, linear, norm, tensor
from srt.models.arch import Arch
from srt.models.decoder import DenseDecoder
from srt.models.moe import expert_parameters


class Mixtral:
    """A `srt.models.blocks.Family`."""

    @staticmethod
    def build(arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> DenseDecoder:
        return DenseDecoder(arch, weights, ops, cos_sin)

    @staticmethod
    def parameters(arch: Arch) -> list[Parameter]:
        hidden, moe = arch.hidden_size, arch.moe
        assert moe is not None
        count = moe.routing.num_experts
        qkv = {"q_proj": arch.q_size, "k_proj": arch.kv_size, "v_proj": arch.kv_size}
        embedding = "model.embed_tokens.weight"
        found = [tensor("embedding", embedding, arch.vocab_size, hidden)]
        for i in range(arch.num_layers):
            name, source = f"layers.{i}", f"model.layers.{i}."
            attention, block = f"{source}self_attn.", f"{source}block_sparse_moe."
            experts = [f"{block}experts.{expert}." for expert in range(count)]
            found += [
                norm(f"{name}.input_norm", f"{source}input_layernorm.weight", hidden),
                linear(f"{name}.qkv", attention, qkv, hidden),
                linear(f"{name}.out", attention, {"o_proj": hidden}, arch.q_size),
                norm(f"{name}.mlp_norm", f"{source}post_attention_layernorm.weight", hidden),
                linear(f"{name}.router", block, {"gate": count}, hidden),
                *expert_parameters(name, experts, ("w1", "w3", "w2"), hidden, moe.inner),
            ]
        found.append(norm("norm", "model.norm.weight", hidden))
        found.append(head("head", embedding, arch.vocab_size, hidden, tied=arch.tied))
        return found
