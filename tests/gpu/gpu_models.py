"""Small checkpoints for a GPU, and networks that guess for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def save_network(folder: Path, model: Path) -> Path:
    """The config of a network that reads what `model` thinks; loaded as noise, hardly a guess of it is
    right."""
    config = json.loads((model / "config.json").read_text())
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 500,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder
