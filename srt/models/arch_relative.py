"""How Inkling's config.json says what its layers are like."""

from __future__ import annotations

from typing import Any

from srt.config.facts import ModelFacts
from srt.config.inkling import is_inkling, is_sliding, kv_heads, state_bytes, taps
from srt.errors import ConfigError
from srt.layers.moe import MoeArch, Routing
from srt.layers.relative import RelativeArch, RelativeLayer
from srt.models.arch_parts import need


def read_relative(facts: ModelFacts) -> RelativeArch | None:
    """None for other families. Raises ConfigError naming a key that is missing or cannot be honoured."""
    if not is_inkling(facts.architecture):
        return None
    config, name = facts.config, facts.name
    if not config.get("shared_expert_sink", True):
        raise ConfigError(f"{name}: shared_expert_sink false is not implemented")
    kinds = is_sliding(config)
    if len(kinds) != facts.num_layers:
        raise ConfigError(f"{name}: layer_types names {len(kinds)} of {facts.num_layers} layers")
    return RelativeArch(
        layers=tuple(_layer(config, name, sliding) for sliding in kinds),
        d_rel=need(config, "d_rel", name),
        alpha=float(config.get("log_scaling_alpha", 0.1)),
        taps=taps(config),
        stored_vocab=need(config, "vocab_size", name),
        divisor=float(config.get("logits_mup_width_multiplier") or 1.0),
        state_bytes=state_bytes(facts),
    )


def _layer(config: dict[str, Any], name: str, sliding: bool) -> RelativeLayer:
    prefix = "swa_" if sliding else ""
    num_kv_heads, head_dim = kv_heads(config, sliding=sliding)
    window = need(config, "sliding_window_size", name) if sliding else None
    floor = None if sliding else config.get("log_scaling_n_floor")
    return RelativeLayer(
        num_heads=need(config, f"{prefix}num_attention_heads", name),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        extent=need(config, "rel_extent", name) if window is None else window,
        floor=None if floor is None else int(floor),
    )


def read_sink_moe(facts: ModelFacts) -> MoeArch:
    """Shared experts are in the stack of the others."""
    config, name = facts.config, facts.name
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        dense = int(config.get("dense_mlp_idx") or 0)
        kinds = ["dense" if layer < dense else "sparse" for layer in range(facts.num_layers)]
    return MoeArch(
        routing=Routing(
            num_experts=need(config, "n_routed_experts", name),
            top_k=need(config, "num_experts_per_tok", name),
            scoring="sigmoid",
            renormalize=True,
            scale=float(config.get("route_scale", 1.0)),
            has_bias=True,
            shared=need(config, "n_shared_experts", name),
        ),
        inner=need(config, "moe_intermediate_size", name),
        shared_inner=0,
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse"),
    )
