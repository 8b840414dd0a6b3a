"""Llama 2/3, SmolLM2 and Mistral against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity import expect_parity, make_prompt, save_tiny
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from srt.errors import ConfigError
from srt.layers.rope import read_rope_scaling
from tests.tiny_models import TINY, Driver, make_runner, read_facts

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_llama_with_every_rope(rope: str, tmp_path: Path) -> None:
    config = LlamaConfig(**TINY, rope_parameters=ROPES[rope], tie_word_embeddings=False)
    expect_parity(LlamaForCausalLM(config), tmp_path)


def test_llama_tied_with_biases_and_wide_heads(tmp_path: Path) -> None:
    config = LlamaConfig(
        **TINY, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=16
    )
    expect_parity(LlamaForCausalLM(config), tmp_path)


def test_mistral_with_a_sliding_window(tmp_path: Path) -> None:
    config = MistralConfig(**TINY, sliding_window=20, attn_implementation="eager")
    expect_parity(MistralForCausalLM(config), tmp_path)


def test_older_config_keys_mean_the_same() -> None:
    scaling = {"type": "linear", "factor": 4.0}
    older = read_rope_scaling({"rope_theta": 9.0, "rope_scaling": scaling}, 8, "m")
    newer = read_rope_scaling(
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9.0}}, 8, "m"
    )
    assert older == newer


def test_unknown_rope_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="rope type 'longrope' is not implemented"):
        read_rope_scaling({"rope_scaling": {"rope_type": "longrope"}}, 8, "m")


@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_bfloat16_stays_near_float32(implementation: str, tmp_path: Path) -> None:
    save_tiny(LlamaForCausalLM(LlamaConfig(**TINY)), tmp_path)
    facts = read_facts(tmp_path)
    prompt = make_prompt(facts.vocab_size)
    exact = Driver(make_runner(facts)).run(prompt, [40])
    rounded = Driver(make_runner(facts, dtype="bfloat16", implementation=implementation)).run(
        prompt, [40]
    )
    assert (rounded - exact).abs().mean() < 0.05 * exact.abs().mean()
