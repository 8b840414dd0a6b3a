"""Models with experts computed by the GPU's kernels, here interpreted, against the same in torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from parity import make_prompt, save_tiny
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

pytest.importorskip("triton", reason="triton is not installed")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined

from tests.tiny_models import TINY, Driver, make_runner, read_facts
from tests.triton_loops import mend_loop_bounds

CHUNKS, LENGTH = [40], 42  # many tokens, then two steps of one


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has models on the GPU")
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_experts_in_triton_are_those_in_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mend_loop_bounds(monkeypatch)
    if name == "mixtral":
        save_tiny(
            MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2)),
            tmp_path,
        )
    else:
        experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        config = Qwen3MoeConfig(**TINY, head_dim=16, mlp_only_layers=[1], **experts)
        save_tiny(Qwen3MoeForCausalLM(config), tmp_path)
    facts = read_facts(tmp_path)
    prompt = make_prompt(facts.vocab_size, LENGTH)
    expected, found = (
        Driver(make_runner(facts, implementation=implementation)).run(prompt, CHUNKS)
        for implementation in ("torch", "triton")
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
