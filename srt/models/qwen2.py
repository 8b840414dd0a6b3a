"""Qwen2 and Qwen2.5, dense: like Llama, with biases on q, k and v, and windows on some layers."""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F

from kernels.ops import Ops
from srt.layers.parameters import Parameter, Weights, head, linear, norm, tensor
from srt.models.arch import Arch
from srt.models.blocks import GatedMlp
from srt.protocols.attention import AttentionBackend, AttentionBatch
from srt.protocols.kv_pool import KVPool


class Qwen2Layer:
    """One decoder layer. The norm that follows the MLP is the next layer's, applied with the sum."""

    __slots__ = ("qkv", "out", "mlp", "input_norm", "mlp_norm", "window")

    def __init__(self, weights: Weights, name: str, ops: Ops, window: int | None) -> None:
        self.qkv = weights.linears[f"{name}.qkv"]
        self.out = weights.linears[f"{name}.out"]
        self.mlp = GatedMlp(weights, name, ops)
        self.input_norm = weights.tensors[f"{name}.input_norm"]
        self.mlp_norm = weights.tensors[f"{name}.mlp_norm"]
        self.window = window


class Qwen2:
    """See `srt.models.blocks.CausalModel` for the contract."""

    def __init__(self, arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> None:
        self.arch = arch
        self.ops = ops
        self.cos_sin = cos_sin
        self.scale = arch.head_dim**-0.5
        self.embedding = weights.tensors["embedding"]
        self.head = weights.linears["head"]
        self.final_norm = weights.tensors["norm"]
        self.layers = [
            Qwen2Layer(weights, f"layers.{index}", ops, arch.windows[index])
            for index in range(arch.num_layers)
        ]

    @classmethod
    def build(cls, arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> Self:
        return cls(arch, weights, ops, cos_sin)

    @classmethod
    def parameters(cls, arch: Arch) -> list[Parameter]:
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

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: AttentionBackend,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        arch, ops, eps = self.arch, self.ops, self.arch.norm_eps
        residual = F.embedding(token_ids, self.embedding)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        last = arch.num_layers - 1
        for index, layer in enumerate(self.layers):
            q = ops.rope_write_kv(
                layer.qkv(x),
                batch.positions,
                self.cos_sin,
                batch.slots,
                pool.keys(index),
                pool.values(index),
                arch.num_heads,
                arch.num_kv_heads,
                arch.head_dim,
            )
            x = attention.forward(q, index, pool, scale=self.scale, window=layer.window)
            x = x.reshape(-1, arch.q_size)
            if index == last and keep is not None:  # nothing below mixes tokens any more
                x, residual = x[keep], residual[keep]
            x, residual = ops.add_rms_norm(layer.out(x), residual, layer.mlp_norm, eps)
            following = self.final_norm if index == last else self.layers[index + 1].input_norm
            x, residual = ops.add_rms_norm(layer.mlp(x), residual, following, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)
