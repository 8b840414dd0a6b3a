"""The parts of an architecture that only some have, read of a config.json: latent attention."""

from __future__ import annotations

import math
from typing import Any

from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.layers.latent import LatentArch


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


def need(config: dict[str, Any], key: str, name: str) -> int:
    """An integer that must be there. Raises ConfigError."""
    value = config.get(key)
    if not isinstance(value, int):
        raise ConfigError(f"{name}: config.json lacks {key}, or it is no integer: {value!r}")
    return value
