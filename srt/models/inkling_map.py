"""Inkling's weight map, in the names of the transformers library."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.ops import Ops
from srt.layers.moe import MoeArch
from srt.layers.parameters import (
    Cut,
    Parameter,
    ParameterKind,
    Part,
    Weights,
    linear,
    norm,
    tensor,
)
from srt.layers.relative import RelativeLayer
from srt.models.arch import Arch
from srt.models.inkling import InklingModel


class Inkling:
    """A `srt.models.blocks.Family`."""

    @staticmethod
    def build(arch: Arch, weights: Weights, ops: Ops, cos_sin: torch.Tensor) -> InklingModel:
        return InklingModel(arch, weights, ops)

    @staticmethod
    def parameters(arch: Arch) -> list[Parameter]:
        relative, moe, hidden = arch.relative, arch.moe, arch.hidden_size
        assert relative is not None and moe is not None
        tokens = Cut(dim=0, first=0, size=arch.vocab_size)
        rows = (relative.stored_vocab, hidden)
        table = Part(source="model.embed_tokens.weight", shape=rows, cut=tokens)
        head = Part(source="lm_head.weight", shape=rows, cut=tokens)
        found = [
            Parameter(name="embedding", kind="tensor", parts=(table,)),
            norm("embedding_norm", "model.embed_tokens.embed_norm.weight", hidden),
        ]
        for index, shape in enumerate(relative.layers):
            name, source = f"layers.{index}", f"model.layers.{index}."
            found += _attention(name, source, arch, shape)
            found.append(
                norm(f"{name}.mlp_norm", f"{source}post_attention_layernorm.weight", hidden)
            )
            if index in moe.layers:
                found += _experts(name, f"{source}mlp.", hidden, moe)
            else:
                found += _dense(name, f"{source}mlp.", arch)
        found.append(norm("norm", "model.norm.weight", hidden))
        found.append(Parameter(name="head", kind="linear", parts=(head,)))
        return found


def _attention(name: str, source: str, arch: Arch, shape: RelativeLayer) -> list[Parameter]:
    relative, hidden, own = arch.relative, arch.hidden_size, f"{source}self_attn."
    assert relative is not None
    inputs = {"q_proj": shape.q_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
    inputs["r_proj"] = shape.num_heads * relative.d_rel
    taps = {
        "k": (f"{own}k_sconv", shape.kv_size),
        "v": (f"{own}v_sconv", shape.kv_size),
        "attention": (f"{source}attn_sconv", hidden),
        "mlp": (f"{source}mlp_sconv", hidden),
    }
    return [
        norm(f"{name}.input_norm", f"{source}input_layernorm.weight", hidden),
        linear(f"{name}.inputs", own, inputs, hidden),
        norm(f"{name}.q_norm", f"{own}q_norm.weight", shape.head_dim),
        norm(f"{name}.k_norm", f"{own}k_norm.weight", shape.head_dim),
        tensor(f"{name}.bank", f"{own}rel_logits_proj.proj", relative.d_rel, shape.extent),
        linear(f"{name}.out", own, {"o_proj": hidden}, shape.q_size),
        *(
            _stored(f"{name}.{kind}_taps", f"{place}.conv1d.weight", width, 1, relative.taps)
            for kind, (place, width) in taps.items()
        ),
    ]


def _dense(name: str, source: str, arch: Arch) -> list[Parameter]:
    hidden, inner = arch.hidden_size, arch.intermediate_size
    sizes = {"gate_proj": inner, "up_proj": inner}
    return [
        linear(f"{name}.gate_up", source, sizes, hidden),
        linear(f"{name}.down", source, {"down_proj": hidden}, inner),
        _stored(f"{name}.scale", f"{source}global_scale", 1),
    ]


def _experts(name: str, source: str, hidden: int, moe: MoeArch) -> list[Parameter]:
    """Shared experts, whose gates and ups are apart in the checkpoint, behind the others."""
    count, inner, shared = moe.routing.num_experts, moe.inner, moe.routing.shared
    theirs = f"{source}shared_experts."
    both = [Part(source=f"{source}experts.gate_up_proj", shape=(count, 2 * inner, hidden))]
    back = [Part(source=f"{source}experts.down_proj", shape=(count, hidden, inner))]
    for index in range(shared):
        one = Cut(dim=0, first=index, size=1)
        for module in ("gate_proj", "up_proj"):
            whole = Part(source=f"{theirs}{module}", shape=(shared, inner, hidden))
            both.append(replace(whole, cut=one))
        whole = Part(source=f"{theirs}down_proj", shape=(shared, hidden, inner))
        back.append(replace(whole, cut=one))
    router = Part(source=f"{source}gate.weight", shape=(count + shared, hidden))
    return [
        Parameter(name=f"{name}.router", kind="linear", parts=(router,)),
        _stored(f"{name}.router_bias", f"{source}gate.e_score_correction_bias", count),
        _stored(f"{name}.router_scale", f"{source}gate.global_scale", 1),
        Parameter(name=f"{name}.experts.gate_up", kind="experts", parts=tuple(both)),
        Parameter(name=f"{name}.experts.down", kind="experts", parts=tuple(back)),
    ]


def _stored(name: str, source: str, *shape: int) -> Parameter:
    """In the type it is stored in."""
    kind: ParameterKind = "exact"
    return Parameter(name=name, kind=kind, parts=(Part(source=source, shape=shape),))
