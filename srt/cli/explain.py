"""`tandem explain`: every setting with its value, source and reason, without loading a model."""

from __future__ import annotations

import argparse

import orjson

from srt.cli.options import add_server_flags, cache_folder, server_args
from srt.cli.progress import PhaseBars
from srt.config.explain import explain, render_table
from srt.config.gate import after_load
from srt.config.latent import is_latent
from srt.config.resolve import resolve
from srt.errors import ConfigError
from srt.launch.boot import draw_identity
from srt.launch.prepare import probe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument(
        "--only", help="show the settings whose name contains this text, e.g. schedule or page_size"
    )
    parser.add_argument(
        "--after-load",
        action="store_true",
        help="as it stands once the model is loaded: with what only loading decides",
    )
    add_server_flags(parser)


def run(options: argparse.Namespace) -> int:
    args, sources = server_args(options)
    with PhaseBars() as bars:
        facts = probe(args, cache_folder(), bars.show)
    resolution = resolve(args, facts, entropy=draw_identity()[1], sources=sources)
    if options.after_load:
        resolution = after_load(
            args, facts, resolution, use_mla_backend=is_latent(facts.model.architecture)
        )
    rows = explain(resolution)
    if options.only:
        rows = [row for row in rows if options.only in f"{row.group}.{row.name}"]
        if not rows:
            raise ConfigError(f"--only {options.only}: no setting's name contains that")
    print(orjson.dumps(rows).decode() if options.json else render_table(rows))
    return 0
