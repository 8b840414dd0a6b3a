"""Opens a checkpoint by its load format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from srt.config.facts import ModelFacts
from srt.errors import ConfigError
from srt.layers.parameters import Parameter
from srt.loading.dummy import dummy_tensors
from srt.loading.quantized import Value, combine
from srt.loading.safetensors_files import safetensors_tensors
from srt.loading.shards import shard_tensors
from srt.quant.stored import read_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    path: Path
    load_format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`tensors`: (Hugging Face name, tensor or quantized weight), read as they are asked for.
    `rope_divisors`: [head_dim/2] or None; a GGUF file stores Llama 3's rope scaling as these numbers
    instead of parameters."""

    tensors: Iterator[tuple[str, Value]]
    rope_divisors: torch.Tensor | None = None


def open_checkpoint(
    path: Path,
    load_format: str,
    facts: ModelFacts,
    parameters: list[Parameter],
    *,
    dtype: torch.dtype,
    seed: int,
    device: torch.device | str = "cpu",
    is_foreign: Callable[[str], bool] = lambda name: False,
    rank: int = 0,
    ranks: int = 1,
) -> Checkpoint:
    """`parameters` is what the model asks for; names that older exporters add to it are dropped, and
    those that are other runners' (`is_foreign`). `dtype` is what quantized values are decoded into.
    `device` is where the tensors will go: what is made and not read is made there. A folder that is
    sharded gives what `rank` of so many `ranks` stores, under the names of `shards.as_stored`.
    Raises ConfigError for a format that is not one."""
    if load_format == "dummy":
        return Checkpoint(tensors=dummy_tensors(parameters, seed, device))
    wanted = {
        part.source for parameter in parameters for part in (*parameter.parts, *parameter.biases)
    }
    if load_format == "gguf":
        from srt.loading.gguf_index import GGUFFile  # its library takes a tenth of a second
        from srt.loading.gguf_weights import gguf_tensors, rope_divisors

        file = GGUFFile(path)
        return Checkpoint(
            tensors=_without_leftovers(gguf_tensors(file, facts, dtype), wanted),
            rope_divisors=rope_divisors(file),
        )
    if load_format == "sharded":
        return Checkpoint(tensors=shard_tensors(path, rank, ranks, device))
    if load_format == "safetensors":
        tensors = safetensors_tensors(path, is_foreign)
        stored = read_stored(facts.config, str(path))
        if stored is None:
            return Checkpoint(tensors=_without_leftovers(tensors, wanted))
        whole = combine(
            tensors, stored, wanted=wanted, dtype=dtype, device=device, origin=str(path)
        )
        return Checkpoint(tensors=_without_leftovers(whole, wanted))
    raise ConfigError(
        f"load_format {load_format!r} holds no weights this runner can read; "
        "known: safetensors, gguf, sharded, dummy"
    )


def _without_leftovers(
    tensors: Iterator[tuple[str, Value]], wanted: set[str]
) -> Iterator[tuple[str, Value]]:
    """Old exporters store rope frequencies, which are computed here, and some store a tied output
    projection a second time. Both say nothing new."""
    for name, value in tensors:
        is_tied_head = name == "lm_head.weight" and name not in wanted
        if not is_tied_head and not name.endswith(".rotary_emb.inv_freq"):
            yield name, value
