"""How the families that have experts say so in their config.json."""

from __future__ import annotations

from typing import Any

from srt.config.experts import sparse_layers
from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.layers.moe import MoeArch, Routing
from srt.models.arch_parts import need
from srt.models.arch_relative import read_sink_moe


def read_moe(facts: ModelFacts) -> MoeArch | None:
    """None for a dense model. Raises ConfigError for a way of choosing experts that is not known."""
    config, name, num_layers = facts.config, facts.name, facts.num_layers
    match facts.architecture:
        case "MixtralForCausalLM":
            return MoeArch(
                routing=Routing(
                    num_experts=need(config, "num_local_experts", name),
                    top_k=need(config, "num_experts_per_tok", name),
                    renormalize=True,
                ),
                inner=need(config, "intermediate_size", name),
                shared_inner=0,
                layers=frozenset(range(num_layers)),
            )
        case "Qwen3MoeForCausalLM":
            return MoeArch(
                routing=Routing(
                    num_experts=need(config, _key_of(config), name),
                    top_k=need(config, "num_experts_per_tok", name),
                    renormalize=bool(config.get("norm_topk_prob", False)),
                ),
                inner=need(config, "moe_intermediate_size", name),
                shared_inner=0,
                layers=sparse_layers(config, num_layers),
            )
        case "DeepseekV2ForCausalLM":
            routing = _route_v2(config, name)
        case "DeepseekV3ForCausalLM":
            routing = _route_v3(config, name)
        case "InklingForCausalLM":
            return read_sink_moe(facts)
        case _:
            return None
    first = int(config.get("first_k_dense_replace") or 0)
    inner = need(config, "moe_intermediate_size", name)
    return MoeArch(
        routing=routing,
        inner=inner,
        shared_inner=inner * int(config.get("n_shared_experts") or 0),
        layers=frozenset(range(first, num_layers)),
    )


def _key_of(config: dict[str, Any]) -> str:
    """Newer files call it as Mixtral does."""
    return "num_experts" if "num_experts" in config else "num_local_experts"


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
