"""A tiny Llama whose answers depend on every token it has read, and those answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from request_set import END, VOCAB, all_requests
from transformers import LlamaConfig, LlamaForCausalLM
from whole_engine import Outcome, Setting, engine

from srt.config.facts import ModelFacts
from tests.models.parity import save_tiny
from tests.tiny_models import TINY, read_facts


@pytest.fixture(scope="session")
def reference_model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    assert (TINY["vocab_size"], TINY["eos_token_id"]) == (VOCAB, END)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = LlamaConfig(**TINY, rope_parameters=rope, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("tiny-llama")
    model = save_tiny(LlamaForCausalLM(config), folder)
    model.name_or_path = str(folder)
    return model


@pytest.fixture(scope="session")
def facts(reference_model: LlamaForCausalLM) -> ModelFacts:
    return read_facts(Path(reference_model.name_or_path))


@pytest.fixture(scope="session")
def alone(facts: ModelFacts) -> dict[int, Outcome]:
    """What each request gets when it has the engine to itself: whole prompts, no cache, no overlap, a
    pool that is never short."""
    found: dict[int, Outcome] = {}
    with engine(facts, Setting(max_running=1, max_step_tokens=512)) as lone:
        for work in all_requests():
            found.update(lone.run([work]))
    return found
