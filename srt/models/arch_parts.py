"""The parts of an architecture that only some have, read of a config.json: latent attention, experts."""

from __future__ import annotations

import math
from typing import Any

from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.layers.latent import LatentArch
from srt.layers.moe import MoeArch, Routing


def read_latent(facts: ModelFacts) -> LatentArch:
    """The scale of the scores is that of the head, times YaRN's temperature squared where the checkpoint
    asks for it (arXiv 2309.00071, 3.4, as DeepSeek applies it)."""
    config = facts.config
    nope, rope = (need(config, f"qk_{part}_head_dim", facts.name) for part in ("nope", "rope"))
    scaling: dict[str, Any] = dict(
        config.get("rope_parameters") or config.get("rope_scaling") or {}
    )
    factor, all_dim = (
        float(scaling.get("factor") or 1.0),
        float(scaling.get("mscale_all_dim") or 0.0),
    )
    temperature = 0.1 * all_dim * math.log(factor) + 1.0 if all_dim and factor > 1 else 1.0
    return LatentArch(
        rank=need(config, "kv_lora_rank", facts.name),
        nope=nope,
        rope=rope,
        value=need(config, "v_head_dim", facts.name),
        q_rank=need(config, "q_lora_rank", facts.name) if config.get("q_lora_rank") else None,
        scale=(nope + rope) ** -0.5 * temperature**2,
        interleaved=bool(config.get("rope_interleave", True)),
    )


def read_moe(facts: ModelFacts) -> MoeArch | None:
    """None for a dense model. Raises ConfigError for a way of choosing experts that is not known."""
    config = facts.config
    match facts.architecture:
        case "DeepseekV2ForCausalLM":
            routing = _route_v2(config, facts.name)
        case "DeepseekV3ForCausalLM":
            routing = _route_v3(config, facts.name)
        case _:
            return None
    first = int(config.get("first_k_dense_replace") or 0)
    inner = need(config, "moe_intermediate_size", facts.name)
    return MoeArch(
        routing=routing,
        inner=inner,
        shared_inner=inner * int(config.get("n_shared_experts") or 0),
        layers=frozenset(range(first, facts.num_layers)),
    )


def _route_v2(config: dict[str, Any], name: str) -> Routing:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{name}: topk_method {method!r} is not implemented; known: greedy, group_limited_greedy"
        )
    is_grouped = method == "group_limited_greedy"
    return Routing(
        num_experts=need(config, "n_routed_experts", name),
        top_k=need(config, "num_experts_per_tok", name),
        renormalize=bool(config.get("norm_topk_prob", False)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        groups=need(config, "n_group", name) if is_grouped else 1,
        top_groups=need(config, "topk_group", name) if is_grouped else 1,
    )


def _route_v3(config: dict[str, Any], name: str) -> Routing:
    for key, known in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if config.get(key, known) != known:
            raise ConfigError(f"{name}: {key} {config[key]!r} is not implemented; known: {known}")
    return Routing(
        num_experts=need(config, "n_routed_experts", name),
        top_k=need(config, "num_experts_per_tok", name),
        scoring="sigmoid",
        renormalize=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        groups=need(config, "n_group", name),
        top_groups=need(config, "topk_group", name),
        has_bias=True,
    )


def need(config: dict[str, Any], key: str, name: str) -> int:
    """An integer that must be there. Raises ConfigError."""
    value = config.get(key)
    if not isinstance(value, int):
        raise ConfigError(f"{name}: config.json lacks {key}, or it is no integer: {value!r}")
    return value
