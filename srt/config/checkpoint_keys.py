"""Typed reading of a checkpoint's JSON: what is missing or of the wrong type is named with its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srt.config.algorithms import DRAFT_ARCHITECTURES
from srt.errors import ConfigError

MODEL_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MiMoForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "InklingForCausalLM",
)
ARCHITECTURES = (*MODEL_ARCHITECTURES, "Script")


def check_architecture(path: Path, key: str, found: object) -> None:
    """Raises ConfigError naming file, key and what is supported."""
    if found not in ARCHITECTURES and found not in DRAFT_ARCHITECTURES:
        raise ConfigError(
            f"{path}: {key} is {found!r}, which is not supported; supported: "
            f"{', '.join(MODEL_ARCHITECTURES)}"
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises ConfigError if it cannot be read, is not JSON or not an object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: an object is needed, not {type(found).__name__}")
    return found


def read_count(path: Path, values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; `default` if the key is missing or null."""
    found = values.get(key)
    if found is None:
        if default is not None:
            return default
        raise ConfigError(f"{path}: {key} is missing")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ConfigError(f"{path}: {key} must be a positive integer, not {found!r}")
    return found


def read_token_ids(path: Path, values: Mapping[str, Any], key: str, vocab_size: int) -> list[int]:
    """One id, a list of ids, or none at all."""
    found = values.get(key)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ConfigError(
                f"{path}: {key} has {token!r}; token ids of this model are 0 to {vocab_size - 1}"
            )
    return ids
