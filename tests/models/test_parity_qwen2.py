"""Qwen2 and Qwen2.5 against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity import expect_parity
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.tiny_models import TINY


@pytest.mark.parametrize("tied", [False, True])
def test_qwen2(tied: bool, tmp_path: Path) -> None:
    expect_parity(Qwen2ForCausalLM(Qwen2Config(**TINY, tie_word_embeddings=tied)), tmp_path)


def test_windows_on_the_later_layers_only(tmp_path: Path) -> None:
    config = Qwen2Config(
        **TINY,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=2,
        attn_implementation="eager",
    )
    expect_parity(Qwen2ForCausalLM(config), tmp_path)
