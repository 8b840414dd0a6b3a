"""`tandem model`: fetch models into the cache, list what is there, look into one."""

from __future__ import annotations

import argparse

from srt.cli.options import cache_folder
from srt.cli.progress import PhaseBars
from srt.config.probe import probe_model
from srt.loading.locate import list_models, locate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    fetch = actions.add_parser("fetch", help="download a model, check it, keep it in the cache")
    fetch.add_argument("name", help="a known name or a hub id")
    actions.add_parser("list", help="models that are known or in the cache")
    show = actions.add_parser("show", help="what a checkpoint is, from its header alone")
    show.add_argument("name", help="a known name, a file, a folder or a hub id")


def run(options: argparse.Namespace) -> int:
    if options.action == "list":
        print_list()
    elif options.action == "fetch":
        print(find(options.name))
    else:
        print_facts(options.name)
    return 0


def find(name: str) -> str:
    with PhaseBars() as bars:
        return locate(name, cache_folder(), lambda phase, part: bars.show("model", phase, part))


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
