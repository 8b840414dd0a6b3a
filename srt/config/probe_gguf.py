"""Facts of a GGUF file, its keys translated to those of a Hugging Face config.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srt.config.checkpoint_keys import read_count, read_token_ids
from srt.config.facts import ModelFacts
from srt.config.gguf_header import Header, read_header
from srt.errors import ConfigError

# general.architecture -> (architecture, model_type, whether q, k and v have biases)
FAMILIES = {
    "llama": ("LlamaForCausalLM", "llama", False),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", True),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}
# llama.cpp's LLAMA_FTYPE: types in which whole files are stored; the rest are block formats, whose
# scales are float16
_FILE_TYPES = {0: "float32", 1: "float16", 32: "bfloat16"}
# ggml's type numbers: how a tensor is stored
_KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16",
}  # fmt: skip
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def probe_gguf(path: Path, name: str) -> ModelFacts:
    header = read_header(path)
    pairs = header.metadata
    kind = pairs.get("general.architecture")
    if kind not in FAMILIES:
        raise ConfigError(
            f"{path}: general.architecture is {kind!r}, which is not supported; supported: "
            f"{', '.join(FAMILIES)}"
        )
    config = _translate(path, pairs, kind, header.tensors)
    vocab_size = config["vocab_size"]
    ends: list[int] = []
    for key in _END_KEYS:
        ends += read_token_ids(path, pairs, f"tokenizer.ggml.{key}", vocab_size)
    return ModelFacts(
        name=name,
        path=str(path),
        format="gguf",
        architecture=config["architectures"][0],
        config=config,
        context_length=config["max_position_embeddings"],
        dtype=config["torch_dtype"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=vocab_size,
        num_parameters=sum(math.prod(shape) for shape in header.tensors.values()),
        end_token_ids=list(dict.fromkeys(ends)),
        stored=_stored(header),
    )


def _stored(header: Header) -> str:
    """The types of the tensors, each with its share of the parameters, the largest first."""
    counts: Counter[str] = Counter()
    for name, shape in header.tensors.items():
        kind = header.kinds[name]
        counts[_KINDS.get(kind, f"ggml type {kind}")] += math.prod(shape)
    total = counts.total() or 1
    shares = [(kind, count / total) for kind, count in counts.most_common()]
    return ", ".join(
        f"{kind} ({f'{share:.1%}' if share >= 0.001 else '<0.1%'})" for kind, share in shares
    )


def _translate(
    path: Path, pairs: Mapping[str, Any], kind: str, tensors: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    architecture, model_type, has_bias = FAMILIES[kind]

    def count(key: str, default: int | None = None) -> int:
        return read_count(path, pairs, f"{kind}.{key}", default)

    hidden, heads = count("embedding_length"), count("attention.head_count")
    tokens = pairs.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": count("attention.key_length", hidden // heads),
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": _round(_number(path, pairs, f"{kind}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _round(_number(path, pairs, f"{kind}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(path, pairs, kind),
        "vocab_size": count("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "attention_bias": has_bias,
        "torch_dtype": _FILE_TYPES.get(pairs.get("general.file_type", 1), "float16"),
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        config[f"{name}_token_id"] = pairs.get(f"tokenizer.ggml.{key}_token_id")
    window = pairs.get(f"{kind}.attention.sliding_window")
    if window:
        config["sliding_window"] = window
    return config


def _rope_scaling(path: Path, pairs: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    form = pairs.get(f"{kind}.rope.scaling.type", "none")
    if form == "none":
        return None
    scaling: dict[str, Any] = {
        "rope_type": form,
        "factor": _round(_number(path, pairs, f"{kind}.rope.scaling.factor")),
    }
    original = pairs.get(f"{kind}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _number(path: Path, pairs: Mapping[str, Any], key: str, default: float | None = None) -> float:
    found = pairs.get(key, default)
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise ConfigError(f"{path}: {key} must be a number, not {found!r}")
    return float(found)


def _round(value: float) -> float:
    """What the float32 in the file was written from: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.6g}")
