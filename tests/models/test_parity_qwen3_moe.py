"""Qwen3 with experts against transformers: experts everywhere, and in some layers only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity import expect_parity
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.tiny_models import TINY


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": True},
        {"decoder_sparse_step": 2, "tie_word_embeddings": True},
        {"mlp_only_layers": [0], "attention_bias": True},
    ],
)
def test_qwen3_moe(changes: dict[str, Any], tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **TINY,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        **changes,
    )
    expect_parity(Qwen3MoeForCausalLM(config), tmp_path)
