"""Writes a model as its ranks will hold it, for `--load-format sharded`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from kernels.linear import Linear
from kernels.linear.quantized import QuantizedWeight
from kernels.moe import Experts
from srt.config.facts import ModelFacts
from srt.config.rules_parallel import why_not
from srt.config.shards import ID_KEY, SHARD_INDEX, VERSION, sum_of
from srt.errors import ConfigError
from srt.layers.parameters import Parameter
from srt.layers.sharding import shard
from srt.loading.checkpoint import open_checkpoint
from srt.loading.fill import fill
from srt.loading.locate import HUB_FILES
from srt.loading.shards import as_stored
from srt.models.arch import arch_for
from srt.models.mtp import foreign_tensors
from srt.models.registry import model_family
from srt.parallel.group import Alone
from srt.runner.dtypes import torch_dtype

FILE_BYTES = 4_000_000_000  # of weights; a file is closed once it has as many
NOISE_SEED = 1
KEPT_APART = (SHARD_INDEX, "model.safetensors.index.json")

Progress = Callable[[str, float], None]


class Seat(Alone):
    """A rank of which only its number is asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


def write_shards(
    facts: ModelFacts,
    ranks: int,
    out: Path,
    dtype: str | None,
    progress: Progress,
    *,
    is_noise: bool = False,
) -> None:
    """`dtype`: of the stored weights, None: the checkpoint's own. `is_noise`: not the checkpoint's
    weights but those that `--load-format dummy --seed 1` would have on a CPU; a configuration is
    enough. `out` appears whole or not at all; in
    memory there are never more than one file, one parameter and what is no linear (an embedding). Raises
    ConfigError for a model that cannot be divided so, and for a folder that is in use."""
    _check(facts, ranks, out)
    name = dtype or facts.dtype
    torch_dtype(name, "--dtype")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as work:
        folder = Path(work) / "whole"
        folder.mkdir()
        identity = uuid.uuid4().hex
        files = []
        for rank in range(ranks):
            shelf = _Shelf(folder=folder, rank=rank, ranks=ranks, identity=identity)
            load_format = "dummy" if is_noise else facts.format
            _write_rank(facts, load_format, shelf, torch_dtype(name, "--dtype"), progress)
            files += shelf.files
        index = {
            "version": VERSION,
            "id": identity,
            "ranks": ranks,
            "dtype": name,
            "num_parameters": facts.num_parameters,
            "config": facts.config,
            "files": files,
        }
        (folder / SHARD_INDEX).write_text(json.dumps(index, indent=1) + "\n")
        _copy_words(Path(facts.path), folder)
        os.replace(folder, out)


def _check(facts: ModelFacts, ranks: int, out: Path) -> None:
    if facts.format != "safetensors":
        raise ConfigError(
            f"{facts.path} is {facts.format}; what is divided is a Hugging Face folder of safetensors"
        )
    if facts.config.get("quantization_config"):
        raise ConfigError(
            f"{facts.name} is quantized; such checkpoints are read as they are (--load-format "
            "safetensors), what is divided is one in bfloat16, float16 or float32"
        )
    trouble = why_not(facts, ranks)
    if trouble:
        fitting = [n for n in range(1, facts.num_heads + 1) if not why_not(facts, n)]
        raise ConfigError(
            f"--tensor-parallel-size {ranks}: {facts.name} has {trouble}; allowed: "
            f"{', '.join(map(str, fitting))}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} is there already; name a new folder or an empty one")


def _write_rank(
    facts: ModelFacts, load_format: str, shelf: _Shelf, dtype: torch.dtype, progress: Progress
) -> None:
    arch = arch_for(facts, shelf.ranks)
    whole = model_family(facts.architecture).parameters(arch)
    seat = Seat(shelf.rank, shelf.ranks)
    own = shard(whole, arch.share(seat.size).head_dim, seat)
    shelf.expect(own)
    checkpoint = open_checkpoint(
        Path(facts.path),
        load_format,
        facts,
        whole,
        dtype=dtype,
        seed=NOISE_SEED,
        is_foreign=foreign_tensors(facts.config, None),
    )
    phase = f"rank {seat.rank} of {seat.size}"
    weights = fill(
        own,
        checkpoint.tensors,
        dtype=dtype,
        device=torch.device("cpu"),
        pack=shelf.keep_linear,
        pack_experts=shelf.keep_experts,
        origin=facts.path,
        progress=lambda fraction: progress(phase, fraction),
    )
    for name, value in weights.tensors.items():
        shelf.keep(name, value)
    shelf.close()


def _copy_words(source: Path, folder: Path) -> None:
    """Configuration, tokenizer, template: all but the weights."""
    for pattern in HUB_FILES:
        for path in source.glob(pattern):
            is_weights = path.suffix == ".safetensors" or path.name in KEPT_APART
            if path.is_file() and not is_weights:
                shutil.copyfile(path, folder / path.name)


class _Kept:
    """Stands for a linear or experts that were written instead of packed."""

    bytes = 0

    def __call__(self, *given: object) -> torch.Tensor:
        raise AssertionError("what is written to a file is not computed with")


@dataclass(slots=True, kw_only=True)
class _Shelf:
    """One rank's tensors on their way to its files."""

    folder: Path
    rank: int
    ranks: int
    identity: str
    files: list[dict[str, object]] = field(default_factory=list)
    _waiting: dict[str, torch.Tensor] = field(default_factory=dict)
    _wanted: set[str] = field(default_factory=set)

    def expect(self, own: list[Parameter]) -> None:
        """What is stored under another's name is not kept."""
        self._wanted = {
            part.source
            for parameter in as_stored(own)
            for part in (*parameter.parts, *parameter.biases)
        }

    def keep_linear(
        self, name: str, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None
    ) -> Linear:
        assert isinstance(weight, torch.Tensor), "quantized checkpoints were refused"
        self.keep(name, weight)
        if bias is not None:
            self.keep(f"{name}.bias", bias)
        return _Kept()

    def keep_experts(
        self,
        owner: str,
        gate_up: torch.Tensor | QuantizedWeight,
        down: torch.Tensor | QuantizedWeight,
    ) -> Experts:
        assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
        self.keep(f"{owner}.experts.gate_up", gate_up)
        self.keep(f"{owner}.experts.down", down)
        return _Kept()

    def keep(self, name: str, value: torch.Tensor) -> None:
        if name not in self._wanted:
            return
        is_view = value.untyped_storage().nbytes() != value.nbytes
        self._waiting[name] = value.clone() if is_view else value
        if sum(each.nbytes for each in self._waiting.values()) >= FILE_BYTES:
            self.close()

    def close(self) -> None:
        """Writes what waits."""
        if not self._waiting:
            return
        name = f"rank-{self.rank}-of-{self.ranks}-{len(self.files):05}.safetensors"
        path = self.folder / name
        save_file(self._waiting, path, {ID_KEY: self.identity, "rank": str(self.rank)})
        path.chmod(0o644)  # readable by whoever serves it
        tensors = {
            key: {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            for key, value in self._waiting.items()
        }
        self.files.append(
            {
                "name": name,
                "rank": self.rank,
                "bytes": path.stat().st_size,
                "sha256": sum_of(path),
                "tensors": tensors,
            }
        )
        self._waiting = {}
