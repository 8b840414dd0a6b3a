"""Ranks that share a model with latents against one that has all of it."""

from __future__ import annotations

from pathlib import Path

import torch
from parity import make_prompt, save_tiny
from test_parity_deepseek import SHAPE, YARN
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from srt.parallel.group import ALONE
from tests.rank_processes import logits_of, run_ranks

PROMPT = make_prompt(SHAPE["vocab_size"], 40)


def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    """Heads and experts are divided, latents are not."""
    v2 = DeepseekV2Config(**SHAPE, q_lora_rank=None, rope_parameters=YARN)
    v3 = DeepseekV3Config(**SHAPE, q_lora_rank=20, n_group=4, topk_group=2)
    save_tiny(DeepseekV2ForCausalLM(v2), tmp_path / "v2")
    save_tiny(DeepseekV3ForCausalLM(v3), tmp_path / "v3")
    given = {name: str(tmp_path / name) for name in ("v2", "v3")}, PROMPT
    alone = logits_of(ALONE, *given)
    first, second = run_ranks(2, logits_of, *given, folder=tmp_path)
    for name, expected in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], expected, rtol=1e-4, atol=1e-4)
