"""DeepSeek V2 and V3 against transformers: latent attention, experts, YaRN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import expect_parity, save_tiny
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from srt.errors import ConfigError
from tests.tiny_models import TINY, make_runner, read_facts

SHAPE: dict[str, Any] = {
    **TINY,
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def test_v2_as_the_lite_model_is(tmp_path: Path) -> None:
    config = DeepseekV2Config(**SHAPE, q_lora_rank=None, topk_method="greedy", rope_parameters=YARN)
    expect_parity(DeepseekV2ForCausalLM(config), tmp_path)


def test_v2_with_query_latents_and_groups(tmp_path: Path) -> None:
    config = DeepseekV2Config(
        **SHAPE,
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        attention_bias=True,
    )
    expect_parity(DeepseekV2ForCausalLM(config), tmp_path)


@pytest.mark.parametrize("interleaved", [False, True])
def test_v3(interleaved: bool, tmp_path: Path) -> None:
    config = DeepseekV3Config(
        **SHAPE,
        q_lora_rank=20,
        n_group=4,
        topk_group=2,
        rope_interleave=interleaved,
        rope_parameters=YARN if interleaved else None,
    )
    model = DeepseekV3ForCausalLM(config)
    for layer in model.model.layers[1:]:
        torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.3)
    expect_parity(model, tmp_path)


def test_the_mtp_layer_of_v3_is_left_alone(tmp_path: Path) -> None:
    """Checkpoints have it behind the model's layers; `num_nextn_predict_layers` says that it is
    there."""
    config = DeepseekV3Config(**SHAPE, q_lora_rank=20, n_group=2, topk_group=1)
    save_tiny(DeepseekV3ForCausalLM(config), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    extra = f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
    save_file({**tensors, extra: torch.zeros(3, 3)}, path, metadata={"format": "pt"})
    make_runner(read_facts(tmp_path, num_nextn_predict_layers=1))
    with pytest.raises(ConfigError, match="eh_proj.weight' belongs to no parameter"):
        make_runner(read_facts(tmp_path, num_nextn_predict_layers=0))
