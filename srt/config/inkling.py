"""Inkling in configuration's eyes: heads differ from layer to layer, and short convolutions remember the
last inputs of each page beside K and V.

A layer has four convolutions: of K, of V, of what attention and of what the MLP give. Each needs the
`conv_kernel_size` - 1 inputs before a token. A page keeps as many, those of its last tokens, in float32;
so whoever has the pages of a prefix (a cached one, or a request that goes on) has the state behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srt.config.facts import ModelFacts

ARCHITECTURE = "InklingForCausalLM"
SMALLEST_PAGE = 16  # what a page keeps is paid for by at least so many tokens
STATE_ITEM = 4  # float32


def is_inkling(architecture: str) -> bool:
    return architecture == ARCHITECTURE


def why_no_guesses(architecture: str) -> str | None:
    """Why nobody can guess this model's tokens; None: it can be done."""
    if not is_inkling(architecture):
        return None
    return "short convolutions, whose state cannot go back behind guesses that were wrong"


def is_sliding(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Of each layer, whether it looks back over a window only."""
    count = int(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(kind == "hybrid_sliding" for kind in kinds)
    local = config.get("local_layer_ids")
    if local is not None:
        return tuple(layer in local for layer in range(count))
    return tuple((layer + 1) % 6 != 0 for layer in range(count))


def kv_heads(config: Mapping[str, Any], *, sliding: bool) -> tuple[int, int]:
    """Number and size."""
    prefix = "swa_" if sliding else ""
    return int(config[f"{prefix}num_key_value_heads"]), int(config[f"{prefix}head_dim"])


def kv_sizes(config: Mapping[str, Any]) -> list[int]:
    """Of each layer, numbers of one token's K."""
    pairs = [kv_heads(config, sliding=sliding) for sliding in is_sliding(config)]
    return [count * size for count, size in pairs]


def taps(config: Mapping[str, Any]) -> int:
    """Tokens that a convolution sees, its own included."""
    return int(config.get("conv_kernel_size") or config.get("sconv_kernel_size") or 4)


def state_bytes(model: ModelFacts) -> int:
    """Of what the convolutions remember, for each token of the cache, at most."""
    if not is_inkling(model.architecture):
        return 0
    widths = [2 * size + 2 * model.hidden_size for size in kv_sizes(model.config)]
    return -(-STATE_ITEM * (taps(model.config) - 1) * sum(widths) // SMALLEST_PAGE)


def vocabulary(config: Mapping[str, Any], stored: int) -> int:
    """Rows that mean a token, of those that are stored."""
    return min(stored, int(config.get("unpadded_vocab_size") or stored))
