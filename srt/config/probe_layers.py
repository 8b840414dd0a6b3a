"""Facts of the MTP layers that lie in a model's own folder: each runs as a draft of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from srt.config.algorithms import LAYERS_KEY
from srt.config.facts import ModelFacts
from srt.errors import ConfigError

LAYERS_OF: Mapping[str, str] = MappingProxyType({"MiMoForCausalLM": "MiMoMTP"})


def layer_facts(model: ModelFacts) -> ModelFacts | None:
    """One layer's facts, None if the model brings none. Raises ConfigError for layers of a kind that is
    not known."""
    count = model.config.get(LAYERS_KEY, 0)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError(f"{model.path}: {LAYERS_KEY} must be a count, not {count!r}")
    if count == 0:
        return None
    if model.architecture not in LAYERS_OF:
        raise ConfigError(
            f"{model.name} ({model.architecture}) brings {count} MTP layers of a kind that is not "
            f"implemented; known: those of {', '.join(LAYERS_OF)}"
        )
    hidden, inner = model.hidden_size, model.config.get("intermediate_size", 0)
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    return replace(
        model,
        architecture=LAYERS_OF[model.architecture],
        num_layers=1,
        num_parameters=hidden * (heads * model.head_dim + 3 * inner + 2 * hidden),
    )
