"""Models whose KV cache holds one latent per token and layer instead of K and V (MLA)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srt.config.facts import ModelFacts
from srt.config.inkling import is_inkling, kv_sizes

LATENT_KEYS = (
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "moe_intermediate_size", "intermediate_size"),
)
LATENT_ARCHITECTURES = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"})


def is_latent(architecture: str) -> bool:
    return architecture in LATENT_ARCHITECTURES


def query_dim(config: Mapping[str, Any]) -> int:
    """Of one head: what is not rotated, and what is."""
    return int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])


def value_dim(config: Mapping[str, Any]) -> int:
    """Of one head's V."""
    return int(config["v_head_dim"])


def absorbed_dims(config: Mapping[str, Any]) -> tuple[int, int]:
    """Of the latent, and of the key that all heads rotate alike."""
    return int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])


def latent_width(config: Mapping[str, Any]) -> int:
    """Numbers of one token in one layer: the latent, and the key that all heads rotate alike."""
    return sum(absorbed_dims(config))


def parameter_count(config: Mapping[str, Any]) -> int:
    """Of all layers, from the shapes, norms left out."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rank, q_rank = int(config["kv_lora_rank"]), int(config.get("q_lora_rank") or 0)
    query, value = query_dim(config), value_dim(config)
    queries = q_rank * (hidden + heads * query) if q_rank else hidden * heads * query
    up = rank * heads * (int(config["qk_nope_head_dim"]) + value)
    attention = queries + hidden * latent_width(config) + up + heads * value * hidden
    layers, dense = int(config["num_hidden_layers"]), int(config.get("first_k_dense_replace") or 0)
    experts = int(config["n_routed_experts"]) + int(config.get("n_shared_experts") or 0)
    moe = hidden * (3 * experts * int(config["moe_intermediate_size"]) + experts)
    mlp = 3 * hidden * int(config["intermediate_size"])
    return layers * attention + dense * mlp + (layers - dense) * moe


def kv_items(model: ModelFacts, kv_heads: int) -> int:
    """Numbers that one rank's KV cache holds of a token, over all layers. `kv_heads`: of that rank; the
    latent belongs to all heads, so each rank has all of it."""
    if is_latent(model.architecture):
        return model.num_layers * latent_width(model.config)
    if is_inkling(model.architecture):
        return 2 * sum(kv_sizes(model.config))
    return 2 * model.num_layers * kv_heads * model.head_dim


def expanded_bytes(model: ModelFacts, item: int) -> int:
    """Of K and V of one token in one layer, made of its latent."""
    config = model.config
    return item * model.num_heads * (query_dim(config) + value_dim(config))
