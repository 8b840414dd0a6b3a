"""Inkling in configuration: what a token costs, which attention it gets, what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from srt.config.args import ServerArgs
from srt.config.dummy import dummy_facts
from srt.config.facts import Facts
from srt.config.inkling import is_sliding, state_bytes
from srt.config.latent import kv_items
from srt.config.resolve import Resolution, resolve
from srt.errors import ConfigError

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 8,
    "local_layer_ids": [0, 2],
    "intermediate_size": 80,
    "n_routed_experts": 8,
}


def inkling_facts(**changes: Any) -> Facts:
    facts = dummy_facts()
    model = replace(
        facts.model, name="ink", architecture="InklingForCausalLM", num_layers=3, hidden_size=48,
        num_heads=6, num_kv_heads=2, head_dim=16, config=CONFIG | changes,
    )  # fmt: skip
    return replace(facts, model=model)


def decide(**fields: Any) -> Resolution:
    return resolve(ServerArgs(**fields), inkling_facts(), entropy=0)


def test_what_a_token_costs() -> None:
    """K and V of each layer's own heads; and for each page of 16 three inputs of all convolutions."""
    model = inkling_facts().model
    assert kv_items(model, 2) == 2 * (32 + 32 + 32)
    assert state_bytes(model) == 4 * 3 * 3 * (2 * 32 + 2 * 48) // 16
    assert state_bytes(dummy_facts().model) == 0


def test_which_layers_have_a_window() -> None:
    assert is_sliding({"num_hidden_layers": 7}) == (True,) * 5 + (False, True)
    kinds = ["hybrid", "hybrid_sliding"]
    assert is_sliding({"num_hidden_layers": 2, "layer_types": kinds}) == (False, True)


def test_attention_with_distances_is_computed_by_torch() -> None:
    spec = decide().runners[0]
    assert spec.prefill_attention_backend == spec.decode_attention_backend == "sdpa"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention_backend": "native"}, "native has no relative positions"),
        ({"tensor_parallel_size": 2}, "short convolutions, which ranks cannot divide yet"),
        ({"speculative_algorithm": "ngram"}, "cannot go back behind guesses that were wrong"),
        ({"page_size": 8}, "--page-size 8 .* allowed for ink: 16 and more"),
        ({"quantization": "int8"}, "has experts"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decide(**fields)
