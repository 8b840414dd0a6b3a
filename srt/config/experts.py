"""Models that have experts, as far as their configuration and their memory are concerned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


def num_experts(config: Mapping[str, Any]) -> int:
    """That a layer's tokens choose among; 0: the model is dense."""
    return next((int(config[key]) for key in KEYS if config.get(key)), 0)


def expert_inner(config: Mapping[str, Any]) -> int:
    """Of one expert. Those whose layers all have experts call it as others call their MLP's."""
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def experts_per_token(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts_per_tok") or 1)


def sparse_layers(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`th layer, counted from one, without those that are listed."""
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    return frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)


def mlp_parameters(config: Mapping[str, Any]) -> int:
    """Of all layers' MLPs, from the shapes; of a model with K and V in every layer."""
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    dense = 3 * hidden * int(config["intermediate_size"])
    count = num_experts(config)
    if not count:
        return layers * dense
    sparse = len(sparse_layers(config, layers))
    experts = count * (3 * hidden * expert_inner(config) + hidden)
    return (layers - sparse) * dense + sparse * experts
