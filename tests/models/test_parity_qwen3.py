"""Qwen3, dense, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity import expect_parity
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.tiny_models import TINY


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3(tied: bool, tmp_path: Path) -> None:
    config = Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=tied, attention_bias=not tied)
    expect_parity(Qwen3ForCausalLM(config), tmp_path)
