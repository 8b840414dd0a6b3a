"""Tiny block drafts on the disk, and what they compute written plainly: dense, no pages, no cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kernels.ops import Ops, select
from srt.models.draft import draft_family
from srt.runner.model_runner import ModelRunner
from tests.tiny_models import make_spec, read_facts

EPS, THETA = 1e-5, 500.0
HIDDEN, HEADS, KV_HEADS, DIM, VOCAB, RANK = 48, 4, 2, 16, 97, 8


@dataclass(frozen=True, slots=True)
class TinyDraft:
    algorithm: str
    folder: Path
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]


def make_draft(folder: Path, algorithm: str, seed: int = 11, **changes: Any) -> TinyDraft:
    """`changes` to its config.json. Weights large enough that every one of them matters."""
    config = {
        "architectures": ["DFlashDraftModel" if algorithm == "dflash" else "Qwen3DSparkModel"],
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "block_size": 8,
        "mask_token_id": 96,
        "target_layer_ids": [0, 1],
    }
    if algorithm == "dspark":
        config |= {
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    config |= changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.3 * noise if "norm" in name else 0.15 * noise
    save_file(weights, folder / "model.safetensors")
    return TinyDraft(algorithm, folder, config, weights)


def draft_runner(
    draft: TinyDraft, target: ModelRunner, ops: Ops | None = None, **changes: Any
) -> ModelRunner:
    """Ready, with pages and tables as the target has them. `changes` to its spec."""
    facts = read_facts(draft.folder)
    runner = ModelRunner(
        make_spec(facts, role="draft", **changes),
        facts,
        ops=ops or select("torch"),
        device=torch.device("cpu"),
        seed=0,
        network=draft_family(draft.algorithm),
        lent=target.lend(),
    )
    runner.load()
    runner.allocate(
        num_pages=target.pool.num_pages,
        page_size=target.pool.page_size,
        max_rows=target.table.host.shape[0],
        table=target.table,
    )
    runner.init_backends()
    return runner


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    inner, rank = config["intermediate_size"], config.get("markov_rank", 0)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(config["target_layer_ids"]) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            f"{at}self_attn.q_norm.weight": (DIM,),
            f"{at}self_attn.k_norm.weight": (DIM,),
            f"{at}mlp.gate_proj.weight": (inner, HIDDEN),
            f"{at}mlp.up_proj.weight": (inner, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, inner),
        }
    if rank:
        shapes |= {
            "markov_head.markov_w1.weight": (VOCAB, rank),
            "markov_head.markov_w2.weight": (VOCAB, rank),
        }
    if config.get("markov_head_type") == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, HIDDEN + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if config.get("markov_head_type") == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + HIDDEN)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.get("enable_confidence_head"):
        width = HIDDEN + (rank if config["confidence_head_with_markov"] else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


# --- the same, plainly --------------------------------------------------------------------------------


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """heads [T, h, d]: a head's two halves are the parts of d/2 complex numbers."""
    first, second = heads.chunk(2, dim=-1)
    speeds = THETA ** (-torch.arange(0, DIM, 2) / DIM)
    angles = positions[:, None, None] * speeds
    out = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((out.real, out.imag), dim=-1)


def context_kv(
    draft: TinyDraft, features: torch.Tensor, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """features [P, F] of positions 0 .. P - 1 -> K and V [P, kv heads, d]."""
    weights, at = draft.weights, f"layers.{layer}.self_attn."
    fused = normed(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    k = (fused @ weights[f"{at}k_proj.weight"].T).view(-1, KV_HEADS, DIM)
    v = (fused @ weights[f"{at}v_proj.weight"].T).view(-1, KV_HEADS, DIM)
    k = normed(k, weights[f"{at}k_norm.weight"])
    return turned(k, torch.arange(len(features))), v


def block_states(
    draft: TinyDraft,
    features: torch.Tensor,
    block: torch.Tensor,
    *,
    sees: torch.Tensor | None = None,
) -> torch.Tensor:
    """block [B, H] embedded, behind P positions with these features. `sees` [B, P + B] bool; None: all
    see all. Returns the normed states, [B, H]."""
    weights = draft.weights
    positions = len(features) + torch.arange(len(block))
    x = block
    for layer in range(draft.config["num_hidden_layers"]):
        own, attn = f"layers.{layer}.", f"layers.{layer}.self_attn."
        h = normed(x, weights[f"{own}input_layernorm.weight"])
        q = normed((h @ weights[f"{attn}q_proj.weight"].T).view(-1, HEADS, DIM),
                   weights[f"{attn}q_norm.weight"])  # fmt: skip
        k = normed((h @ weights[f"{attn}k_proj.weight"].T).view(-1, KV_HEADS, DIM),
                   weights[f"{attn}k_norm.weight"])  # fmt: skip
        v = (h @ weights[f"{attn}v_proj.weight"].T).view(-1, KV_HEADS, DIM)
        before_k, before_v = context_kv(draft, features, layer)
        q, keys = turned(q, positions), torch.cat((before_k, turned(k, positions)))
        values = torch.cat((before_v, v))
        heads = []
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            scores = q[:, head] @ keys[:, group].T / DIM**0.5
            if sees is not None:
                scores = scores.masked_fill(~sees, -torch.inf)
            heads.append(scores.softmax(-1) @ values[:, group])
        x = x + torch.cat(heads, dim=-1) @ weights[f"{attn}o_proj.weight"].T
        h = normed(x, weights[f"{own}post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(h @ weights[f"{own}mlp.gate_proj.weight"].T)
        up = h @ weights[f"{own}mlp.up_proj.weight"].T
        x = x + (gate * up) @ weights[f"{own}mlp.down_proj.weight"].T
    return normed(x, weights["norm.weight"])


def walk(
    draft: TinyDraft, states: torch.Tensor, logits: torch.Tensor, last: int
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """DSPARK's greedy walk through one block: the guesses, the logits [n, V] that told them and the
    chance [n] of each."""
    weights, kind = draft.weights, draft.config["markov_head_type"]
    memory = torch.zeros(RANK)
    tokens, told, chances = [], [], []
    for state, row in zip(states, logits, strict=True):
        known = weights["markov_head.markov_w1.weight"][last]
        mixed = known
        if kind == "gated":
            gate = weights["markov_head.gate_proj.weight"] @ torch.cat((state, known))
            mixed = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * known
        if kind == "rnn":
            joint = weights["markov_head.joint_proj.weight"] @ torch.cat((memory, known, state))
            joint = joint + weights["markov_head.joint_proj.bias"]
            keep = torch.sigmoid(joint[:RANK])
            memory = keep * memory + (1 - keep) * torch.tanh(joint[RANK : 2 * RANK])
            mixed = torch.tanh(joint[2 * RANK :])
        told.append(row + weights["markov_head.markov_w2.weight"] @ mixed)
        seen = torch.cat((state, known)) if draft.config["confidence_head_with_markov"] else state
        score = weights["confidence_head.proj.weight"][0] @ seen
        chances.append(torch.sigmoid(score + weights["confidence_head.proj.bias"][0]))
        last = int(told[-1].argmax())
        tokens.append(last)
    return tokens, torch.stack(told), torch.stack(chances)
