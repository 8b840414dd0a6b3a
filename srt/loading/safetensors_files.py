"""Weights in a Hugging Face directory: one safetensors file, or shards with an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError, safe_open

from srt.errors import ConfigError

INDEX = "model.safetensors.index.json"


def safetensors_tensors(
    folder: Path, is_foreign: Callable[[str], bool] = lambda name: False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the folder but those that are foreign, file by file, mapped rather than read. With
    an index, each tensor comes from the shard the index names. Raises ConfigError naming the file
    at fault."""
    for path, names in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                stored = set(file.keys())
                absent = sorted((names or stored) - stored)
                if absent:
                    raise ConfigError(f"{path}: the index names {absent[0]!r}, the file lacks it")
                for name in sorted(stored):
                    if not is_foreign(name):
                        yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error


def tensor_names(folder: Path) -> frozenset[str]:
    """What the folder holds, without reading it. Raises ConfigError like `safetensors_tensors`."""
    found: set[str] = set()
    for path, names in _files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                found |= names or set(file.keys())
        except SafetensorError as error:
            raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error
    return frozenset(found)


def _files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    index = folder / INDEX
    if index.is_file():
        shards: dict[str, set[str]] = {}
        for name, shard in orjson.loads(index.read_bytes())["weight_map"].items():
            shards.setdefault(shard, set()).add(name)
        for shard in shards:
            if not (folder / shard).is_file():
                raise ConfigError(f"{index}: names the shard {shard}, which is not there")
        return [(folder / shard, names) for shard, names in sorted(shards.items())]
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(
            f"{folder}: no *.safetensors here; other formats (pytorch_model.bin) are not loaded, "
            "because they can run code. Convert it to safetensors or give a GGUF file"
        )
    return [(path, None) for path in paths]
