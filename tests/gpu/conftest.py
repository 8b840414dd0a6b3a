"""What runs on a GPU and nowhere else. A machine without one skips it, and says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_engine import Built, build

from srt.config.probe import probe_model
from srt.loading.dummy import dummy_tensors
from srt.models.arch import read_arch
from srt.models.registry import model_family
from tests.layered_models import loud, save

SHAPES: dict[str, dict[str, Any]] = {  # a Qwen3 has norms of its heads, a Llama has none
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "num_attention_heads": 4},
    "llama": {"architectures": ["LlamaForCausalLM"], "head_dim": 64, "num_attention_heads": 8},
}
NUMBERS = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 998,
    "eos_token_id": 999,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no usable GPU: torch sees no CUDA device"))


def save_model(folder: Path, shape: str) -> Path:
    """A small checkpoint of noise that is loud enough for every token to matter."""
    config = {**NUMBERS, **SHAPES[shape]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    facts = probe_model(folder, shape)
    arch = read_arch(facts)
    tensors = loud(dummy_tensors(model_family(facts.architecture).parameters(arch), 3))
    for name in tensors:
        if (
            "q_proj" in name or "k_proj" in name
        ):  # or each token would look at one other and no more
            tensors[name] /= 4
    save(folder, {name: value.bfloat16() for name, value in tensors.items()}, **config)
    return folder


@pytest.fixture(scope="session", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def engine(model: Path, cache: str) -> Iterator[Built]:
    """With decode graphs, as it is served."""
    with build(model, cache) as built:
        yield built
