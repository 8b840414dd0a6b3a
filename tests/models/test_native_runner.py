"""A whole model on the compiled kernels against the same model on their references, in bfloat16."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity import make_prompt, save_tiny
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kernels.native_build import Library, Unavailable, build
from kernels.ops import select
from srt.runner.model_runner import ModelRunner
from tests.tiny_models import TINY, Driver, make_spec, read_facts

WIDE = {**TINY, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    built = build(tmp_path_factory.mktemp("kernels"), shutil.which("cc"))
    if isinstance(built, Unavailable):
        pytest.skip(f"no native kernels: {built.reason}")
    return built


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_native_equals_reference(family: str, library: Library, tmp_path: Path) -> None:
    if family == "mistral":
        save_tiny(MistralForCausalLM(MistralConfig(**WIDE, sliding_window=20)), tmp_path)
    else:
        save_tiny(Qwen3ForCausalLM(Qwen3Config(**WIDE)), tmp_path)
    facts = read_facts(tmp_path)
    spec = make_spec(facts, dtype="bfloat16")
    native = replace(spec, prefill_attention_backend="native", decode_attention_backend="native")
    prompt = make_prompt(facts.vocab_size)
    found = {}
    for implementation, its_spec in (("native", native), ("reference", spec)):
        runner = ModelRunner(
            its_spec,
            facts,
            ops=select(implementation, library),
            device=torch.device("cpu"),
            seed=0,
        )
        runner.load()
        runner.allocate(num_pages=65, page_size=16, max_rows=4)
        runner.init_backends()
        found[implementation] = Driver(runner).run(prompt, [33, 20])
    error = (found["native"] - found["reference"]).abs()
    assert error.mean() < 0.02 * found["reference"].abs().mean()
    assert error.max() < 0.1 * found["reference"].abs().max()
