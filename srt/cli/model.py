"""`tandem model`: fetch models into the cache, list what is there, look into one, divide one."""

from __future__ import annotations

import argparse
from pathlib import Path

from srt.cli.options import cache_folder
from srt.cli.progress import PhaseBars
from srt.config.probe import probe_model
from srt.config.shards import DTYPES, SHARD_INDEX, check_sums, read_index
from srt.errors import ConfigError
from srt.loading.locate import list_models, locate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    fetch = actions.add_parser("fetch", help="download a model, check it, keep it in the cache")
    fetch.add_argument("name", help="a known name or a hub id")
    actions.add_parser("list", help="models that are known or in the cache")
    show = actions.add_parser("show", help="what a checkpoint is, from its header alone")
    show.add_argument("name", help="a known name, a file, a folder or a hub id")
    shard = actions.add_parser("shard", help="store a model as its ranks hold it, to load faster")
    shard.add_argument("--model", required=True, help="a folder of safetensors or a hub id")
    shard.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks (default: 1)"
    )
    shard.add_argument("--out", type=Path, required=True, help="a folder that is made")
    shard.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are)")
    shard.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: weights of noise, as of `tandem serve --load-format dummy --seed 1`",
    )
    check = actions.add_parser("check", help="read a sharded model and compare its SHA-256 sums")
    check.add_argument("folder", type=Path)


def run(options: argparse.Namespace) -> int:
    if options.action == "list":
        print_list()
    elif options.action == "fetch":
        print(find(options.name))
    elif options.action == "shard":
        write(
            options.model,
            options.tensor_parallel_size,
            options.out,
            options.dtype,
            options.load_format == "dummy",
        )
    elif options.action == "check":
        check_folder(options.folder)
    else:
        print_facts(options.name)
    return 0


def find(name: str) -> str:
    with PhaseBars() as bars:
        return locate(name, cache_folder(), lambda phase, part: bars.show("model", phase, part))


def write(name: str, ranks: int, out: Path, dtype: str | None, is_noise: bool) -> None:
    from srt.runner.shard import write_shards  # torch

    if ranks < 1:
        raise ConfigError(f"--tensor-parallel-size must be 1 or more, not {ranks}")
    facts = probe_model(find(name), name)
    with PhaseBars() as bars:
        write_shards(
            facts,
            ranks,
            out,
            dtype,
            lambda phase, part: bars.show("shard", phase, part),
            is_noise=is_noise,
        )
    parallel = "" if ranks == 1 else f" --tensor-parallel-size {ranks}"
    print(f"{out}: {facts.name} for {ranks} rank{'s'[: ranks > 1]}")
    print(f"tandem serve --model {out}{parallel}")


def check_folder(folder: Path) -> None:
    index = read_index(folder)
    if index is None:
        raise ConfigError(
            f"{folder} has no {SHARD_INDEX}; `tandem model shard` writes such folders"
        )
    check_sums(folder, index)
    print(f"{folder}: {len(index.files)} files are what was written")


def print_list() -> None:
    for model in list_models(cache_folder()):
        size = f"{model.bytes / 1e6:,.0f} MB" if model.path else "not fetched"
        print(f"{model.name:<24}{size:>14}  {model.about}")
        if model.path:
            print(f"{'':<24}{'':>14}  {model.path}")


def print_facts(name: str) -> None:
    facts = probe_model(find(name), name)
    rows = {
        "path": facts.path,
        "format": facts.format,
        "ranks": facts.shards or "any",
        "architecture": facts.architecture,
        "parameters": f"{facts.num_parameters / 1e6:,.1f} million",
        "layers": facts.num_layers,
        "hidden size": facts.hidden_size,
        "heads": f"{facts.num_heads}, {facts.num_kv_heads} for keys and values",
        "head size": facts.head_dim,
        "vocabulary": facts.vocab_size,
        "context length": facts.context_length,
        "stored as": facts.stored or facts.dtype,
        "end tokens": facts.end_token_ids,
    }
    for key, value in rows.items():
        print(f"{key:<16}{value}")
