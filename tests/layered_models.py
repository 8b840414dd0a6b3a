"""A small MiMo with MTP layers and an EAGLE draft of it, stored, and their layers in plain torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from kernels.ops import select
from srt.config.facts import ModelFacts
from srt.config.probe_layers import layer_facts
from srt.loading.dummy import dummy_tensors
from srt.models.arch import read_arch
from srt.models.draft import DraftFamily, DraftSource
from srt.models.eagle import Eagle
from srt.models.mtp import Mtp
from srt.models.registry import model_family
from srt.runner.model_runner import ModelRunner
from tests.tiny_models import TINY, make_spec, read_facts

EPS = 1e-6
NUM_LAYERS = 3  # MTP layers
Tensors = dict[str, torch.Tensor]


def loud(tensors: Any) -> Tensors:
    """Noise that is loud enough for every token to matter."""
    return {name: value if "norm" in name else value * 8 for name, value in tensors}


def save(folder: Path, tensors: Tensors, **config: Any) -> ModelFacts:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return read_facts(folder)


def config_of(**changes: Any) -> dict[str, Any]:
    return {
        **TINY,
        "rms_norm_eps": EPS,
        "rope_theta": 500.0,
        "tie_word_embeddings": False,
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": NUM_LAYERS,
        **changes,
    }


def target_tensors(facts: ModelFacts) -> Tensors:
    arch = read_arch(facts)
    return loud(dummy_tensors(model_family(facts.architecture).parameters(arch), seed=3))


def noisy_layers(facts: ModelFacts) -> Tensors:
    its = layer_facts(facts)
    assert its is not None
    source = DraftSource(arch=read_arch(its), config=its.config, stored=frozenset())
    found: Tensors = {}
    for step in range(NUM_LAYERS):
        found |= loud(dummy_tensors(Mtp(step).parameters(source), seed=4))
    return found


def noisy_eagle(facts: ModelFacts, num_layers: int) -> Tensors:
    arch = replace(read_arch(facts), num_layers=num_layers)
    source = DraftSource(arch=arch, config={}, stored=frozenset())
    return loud(dummy_tensors(Eagle.parameters(source), seed=5))


def save_noisy(folder: Path) -> ModelFacts:
    """Target and MTP layers of noise, in one folder."""
    facts = save(folder, {}, **config_of())
    return save(folder, target_tensors(facts) | noisy_layers(facts), **config_of())


def save_perfect(folder: Path) -> tuple[ModelFacts, ModelFacts]:
    """A target of one layer, whose MTP layers all compute what it computes; and an EAGLE draft that
    does so but for the scale of its logits. That works because the embeddings are normed already."""
    config = config_of(num_hidden_layers=1)
    tensors = target_tensors(save(folder, {}, **config))
    embedding = "model.embed_tokens.weight"
    tensors[embedding] = F.rms_norm(tensors[embedding], (TINY["hidden_size"],), eps=EPS)
    one = torch.ones(TINY["hidden_size"])
    tensors["model.layers.0.input_layernorm.weight"] = tensors["model.norm.weight"] = one
    shared = {
        name.removeprefix("model.layers.0."): value
        for name, value in tensors.items()
        if name.startswith("model.layers.0.")
    }
    eye, zero = torch.eye(len(one)), torch.zeros(len(one), len(one))
    layers: Tensors = {}
    for step in range(NUM_LAYERS):
        prefix = f"model.mtp_layers.{step}."
        layers |= {prefix + name: value.clone() for name, value in shared.items()}
        layers[f"{prefix}input_proj.weight"] = torch.cat((zero, eye), dim=1)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            layers[f"{prefix}{name}.weight"] = one.clone()
    facts = save(
        folder, {name: value.clone() for name, value in (tensors | layers).items()}, **config
    )
    eagle = {f"layers.0.{name}": value.clone() for name, value in shared.items()}
    del eagle["layers.0.input_layernorm.weight"]
    eagle["fc.weight"] = torch.cat((eye, zero), dim=1)
    its = save(folder / "eagle", eagle, **{**config, "architectures": ["Qwen2ForCausalLM"]})
    return facts, its


def load_network(
    target: ModelRunner, facts: ModelFacts, family: DraftFamily, step: int | None = None
) -> ModelRunner:
    """Beside a target that has its pool."""
    runner = ModelRunner(
        make_spec(facts, role="draft", step=step),
        facts,
        ops=select("torch"),
        device=torch.device("cpu"),
        seed=0,
        network=family,
        lent=target.lend(),
    )
    runner.load()
    runner.allocate(
        num_pages=target.pool.num_pages,
        page_size=target.pool.page_size,
        max_rows=4,
        table=target.table,
    )
    runner.init_backends()
    return runner


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, D]."""
    cos, sin = cos_sin[: len(x), None].chunk(2, dim=-1)
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def plain_layer(
    tensors: Tensors, prefix: str, facts: ModelFacts, x: torch.Tensor, cos_sin: torch.Tensor
) -> torch.Tensor:
    """A decoder layer without pages, masks or kernels, all tokens at once: x [T, H] -> [T, H]. Norms
    and biases are there if they are stored."""
    d, length = facts.head_dim, len(x)
    norm = tensors.get(f"{prefix}input_layernorm.weight")
    y = x if norm is None else normed(x, norm)
    heads = {"q": facts.num_heads, "k": facts.num_kv_heads, "v": facts.num_kv_heads}
    q, k, v = (
        F.linear(
            y,
            tensors[f"{prefix}self_attn.{name}_proj.weight"],
            tensors.get(f"{prefix}self_attn.{name}_proj.bias"),
        ).view(length, count, d)
        for name, count in heads.items()
    )
    q, k = rotate(q, cos_sin), rotate(k, cos_sin)
    group = facts.num_heads // facts.num_kv_heads
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    x = x + mixed @ tensors[f"{prefix}self_attn.o_proj.weight"].T
    y = normed(x, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate = y @ tensors[f"{prefix}mlp.gate_proj.weight"].T
    up = y @ tensors[f"{prefix}mlp.up_proj.weight"].T
    return x + (F.silu(gate) * up) @ tensors[f"{prefix}mlp.down_proj.weight"].T
