"""A model stored as its ranks hold it: what `tandem model shard` writes beside the weights.

The folder has `tandem_shards.json` (version, id, ranks, dtype, num_parameters, config, and of each file
name, rank, bytes, sha256, tensors), the checkpoint's own config and tokenizer files, and for each rank
one file or several, `rank-R-of-N-00000.safetensors`. Each of them names the id in its metadata, so that
files of another folder are found out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srt.config.checkpoint_keys import read_json_object
from srt.errors import ConfigError

SHARD_INDEX = "tandem_shards.json"
VERSION = 1
DTYPES = ("bfloat16", "float16", "float32")
ID_KEY = "tandem_shards"  # of a file's metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    name: str
    rank: int
    bytes: int
    sha256: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """`config`: config.json as it was when the model was divided."""

    id: str
    ranks: int
    dtype: str
    num_parameters: int  # of the whole model
    config: Mapping[str, Any]
    files: tuple[ShardFile, ...]

    def of_rank(self, rank: int) -> list[ShardFile]:
        return [file for file in self.files if file.rank == rank]


def read_index(folder: Path) -> ShardIndex | None:
    """None: the folder is not of this kind. Raises ConfigError naming the index."""
    path = folder / SHARD_INDEX
    if not path.is_file():
        return None
    found = read_json_object(path)
    if found.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {found.get('version')!r}, this Tandem reads {VERSION}; write it again "
            "with `tandem model shard`"
        )
    try:
        if found["dtype"] not in DTYPES:
            raise ValueError(f"dtype {found['dtype']!r}")
        return ShardIndex(
            id=str(found["id"]),
            ranks=int(found["ranks"]),
            dtype=str(found["dtype"]),
            num_parameters=int(found["num_parameters"]),
            config=dict(found["config"]),
            files=tuple(
                ShardFile(
                    name=str(file["name"]),
                    rank=int(file["rank"]),
                    bytes=int(file["bytes"]),
                    sha256=str(file["sha256"]),
                    tensors=tuple(file["tensors"]),
                )
                for file in found["files"]
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no index of shards: {error!r}") from None


def check_config(folder: Path, index: ShardIndex, config: Mapping[str, Any]) -> None:
    """Raises ConfigError if config.json is not the one that the weights were divided by."""
    keys = index.config.keys() | config.keys()
    changed = sorted(key for key in keys if index.config.get(key) != config.get(key))
    if changed:
        raise ConfigError(
            f"{folder / 'config.json'}: {changed[0]} is {config.get(changed[0])!r}, but the model was "
            f"divided with {index.config.get(changed[0])!r}; shard it again"
        )


def check_files(folder: Path, index: ShardIndex) -> None:
    """That every rank's files are there and whole. Raises ConfigError naming one that is not."""
    for file in index.files:
        path = folder / file.name
        if not path.is_file():
            raise ConfigError(f"{path} is missing; {SHARD_INDEX} names it")
        if path.stat().st_size != file.bytes:
            raise ConfigError(
                f"{path} has {path.stat().st_size} bytes, {SHARD_INDEX} says {file.bytes}; it was cut "
                "short or replaced"
            )


def check_sums(folder: Path, index: ShardIndex) -> None:
    """Reads every byte. Raises ConfigError naming the file that is not what was written."""
    check_files(folder, index)
    for file in index.files:
        if sum_of(folder / file.name) != file.sha256:
            raise ConfigError(
                f"{folder / file.name} is not what was written: its SHA-256 differs from the one in "
                f"{SHARD_INDEX}"
            )


def sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
