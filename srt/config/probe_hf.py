"""Facts of a Hugging Face folder: config.json, generation_config.json, headers of the weight files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from srt.config.checkpoint_keys import (
    check_architecture,
    read_count,
    read_json_object,
    read_token_ids,
)
from srt.config.experts import mlp_parameters
from srt.config.facts import ModelFacts
from srt.config.inkling import vocabulary
from srt.config.latent import LATENT_KEYS, is_latent, parameter_count, query_dim
from srt.config.safetensors_header import code_of, count_parameters, main_dtype, stored_bytes
from srt.config.shards import check_config, read_index
from srt.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
_INDEX = "model.safetensors.index.json"
_NOT_DEFAULTS = ("transformers_version", "_from_model_config")


def probe_hf(folder: Path, name: str) -> ModelFacts:
    path = folder / "config.json"
    config = read_json_object(path)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(
            f"{path}: architectures must be a list of one name, not {architectures!r}"
        )
    check_architecture(path, "architectures", architectures[0])
    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    hidden = read_count(path, config, "hidden_size")
    heads = read_count(path, config, "num_attention_heads")
    vocab_size = vocabulary(config, read_count(path, config, "vocab_size"))
    if is_latent(architectures[0]):
        for key in LATENT_KEYS:
            read_count(path, config, key)
        head_dim = query_dim(config)
    else:
        head_dim = read_count(path, config, "head_dim", hidden // heads)
    index = read_index(folder)
    if index is None:
        counts = _count_weights(folder)
    else:
        check_config(folder, index, config)
        counts = Counter({code_of(index.dtype): index.num_parameters})
    ends = read_token_ids(path, config, "eos_token_id", vocab_size)
    ends += read_token_ids(generation_path, generation, "eos_token_id", vocab_size)
    return ModelFacts(
        name=name,
        path=str(folder),
        format="safetensors" if index is None else "sharded",
        architecture=architectures[0],
        config=config,
        context_length=read_count(path, config, "max_position_embeddings"),
        dtype=_dtype(path, config, counts) if index is None else index.dtype,
        num_layers=read_count(path, config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=read_count(path, config, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        num_parameters=_num_parameters(path, config, counts, heads * head_dim),
        end_token_ids=list(dict.fromkeys(ends)),
        generation_defaults={
            key: value for key, value in generation.items() if key not in _NOT_DEFAULTS
        },
        stored_bytes=stored_bytes(counts),
        shards=0 if index is None else index.ranks,
    )


def _num_parameters(path: Path, config: dict[str, Any], counts: Counter[str], q_size: int) -> int:
    """As the files hold them; where they are packed, or there are none, from the shapes."""
    if config.get("quantization_config"):
        return _estimate(path, config, q_size)
    return counts.total() or _estimate(path, config, q_size)


def _dtype(path: Path, config: dict[str, Any], counts: Counter[str]) -> str:
    declared = config.get("dtype") or config.get("torch_dtype") or main_dtype(counts) or "float32"
    if declared not in DTYPES:
        raise ConfigError(f"{path}: dtype is {declared!r}; supported: {', '.join(DTYPES)}")
    return str(declared)


def _count_weights(folder: Path) -> Counter[str]:
    """Over all shards; none when the folder holds no weights, which `--load-format dummy` allows."""
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index}: weight_map must be an object, not {weight_map!r}")
        files = [folder / str(file) for file in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    counts: Counter[str] = Counter()
    for file in files:
        counts.update(count_parameters(file))
    return counts


def _estimate(path: Path, config: dict[str, Any], q_size: int) -> int:
    """Parameters from the shapes, norms left out."""
    hidden = read_count(path, config, "hidden_size")
    heads = read_count(path, config, "num_attention_heads")
    embeddings = 1 if config.get("tie_word_embeddings") else 2
    embeddings *= hidden * read_count(path, config, "vocab_size")
    if is_latent(config["architectures"][0]):
        return embeddings + parameter_count(config)
    kv_size = q_size // heads * read_count(path, config, "num_key_value_heads", heads)
    attention = hidden * (2 * q_size + 2 * kv_size)
    for key in ("intermediate_size", "num_hidden_layers"):
        read_count(path, config, key)
    return int(config["num_hidden_layers"]) * attention + mlp_parameters(config) + embeddings
