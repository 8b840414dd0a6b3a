"""Mixtral against transformers, with and without a window."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity import expect_parity
from transformers import MixtralConfig, MixtralForCausalLM

from tests.tiny_models import TINY


@pytest.mark.parametrize("window", [None, 20])
def test_mixtral(window: int | None, tmp_path: Path) -> None:
    config = MixtralConfig(
        **TINY, num_local_experts=5, num_experts_per_tok=2, sliding_window=window
    )
    expect_parity(MixtralForCausalLM(config), tmp_path)
