"""Reads a model that is stored as its ranks hold it: what `srt.layers.sharding` cut, already stacked.

A stored parameter is one tensor (and one bias) under the parameter's own name, so loading is mapping
files and packing; nothing is cut or joined. Two parameters that are made of the same tensors, as a tied
head and its embedding on one rank, are stored once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from srt.config.shards import ID_KEY, SHARD_INDEX, ShardFile, ShardIndex, check_files, read_index
from srt.errors import ConfigError
from srt.layers.parameters import Parameter, Part


def as_stored(parameters: Sequence[Parameter]) -> list[Parameter]:
    """One rank's parameters, with its cuts, as those of a model whose tensors are the stored ones."""
    names: dict[tuple[Part, ...], str] = {}
    found = []
    for parameter in parameters:
        name = names.setdefault(parameter.parts, parameter.name)
        is_flat = parameter.kind == "experts"
        parts = (Part(source=name, shape=_stacked(parameter.parts, is_flat)),)
        biases: tuple[Part, ...] = ()
        if parameter.biases:
            biases = (Part(source=f"{parameter.name}.bias", shape=_stacked(parameter.biases)),)
        found.append(replace(parameter, parts=parts, biases=biases))
    return found


def _stacked(parts: tuple[Part, ...], is_flat: bool = False) -> tuple[int, ...]:
    """`is_flat`: tensors of several experts are rows of each, like the others."""
    kept = [_kept(part) for part in parts]
    if is_flat:
        kept = [(math.prod(shape[:-1]), shape[-1]) for shape in kept]
    return sum(shape[0] for shape in kept), *kept[0][1:]


def _kept(part: Part) -> tuple[int, ...]:
    if part.cut is None:
        return part.shape
    dim = part.cut.dim
    return *part.shape[:dim], part.cut.size, *part.shape[dim + 1 :]


def open_index(folder: Path) -> ShardIndex:
    """Raises ConfigError if the folder is not of this kind, or a file of any rank is missing or cut."""
    index = read_index(folder)
    if index is None:
        raise ConfigError(
            f"{folder} has no {SHARD_INDEX}; `tandem model shard` writes such folders"
        )
    check_files(folder, index)
    return index


def shard_tensors(
    folder: Path, rank: int, size: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """One rank's tensors by their stored names; what goes to a GPU is mapped, what stays is read, for
    products are summed in another order where memory is not aligned. Raises ConfigError for another
    number of ranks, and naming the file that is missing, cut short or of another folder."""
    index = open_index(folder)
    if index.ranks != size:
        raise ConfigError(f"{folder} is stored for {index.ranks} ranks, not for {size}")
    stays = torch.device(device).type == "cpu"
    for file in index.of_rank(rank):
        for name, value in _read(folder, index, file):
            yield name, value.clone() if stays else value


def whole_rows(folder: Path, name: str) -> torch.Tensor:
    """A tensor whose rows the ranks divide, put together again."""
    index = open_index(folder)
    parts = [
        value
        for file in index.files
        if name in file.tensors
        for stored, value in _read(folder, index, file)
        if stored == name
    ]
    if len(parts) != index.ranks:
        raise ConfigError(f"{folder}: {name!r} is there {len(parts)} times for {index.ranks} ranks")
    return torch.cat(parts)


def _read(folder: Path, index: ShardIndex, file: ShardFile) -> Iterator[tuple[str, torch.Tensor]]:
    path = folder / file.name
    try:
        with safe_open(path, framework="pt") as opened:
            if (opened.metadata() or {}).get(ID_KEY) != index.id:
                raise ConfigError(
                    f"{path} was not written together with {SHARD_INDEX} beside it; it is of another "
                    "folder or another run of `tandem model shard`"
                )
            stored = set(opened.keys())
            if stored != set(file.tensors):
                raise ConfigError(f"{path} does not hold the tensors that {SHARD_INDEX} names")
            for name in file.tensors:
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error
