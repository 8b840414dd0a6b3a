"""The command line of ServerArgs: one flag per field, grouped by bag."""

from __future__ import annotations

import argparse
import typing
from pathlib import Path
from typing import Any

from srt.config.args import ServerArgs
from srt.config.file import GROUPS, read_config_file
from srt.config.leaves import Leaf, convert_all, leaf_table
from srt.config.trail import InputSource

TITLES = {
    "runner": "model runner",
    "exec": "execution",
    "spec": "speculation",
    "draft": "draft runner",
}


def build_parser(prog: str = "tandem") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag, and `--config`. A flag that is not typed leaves no trace in the namespace."""
    parser.add_argument(
        "--config", metavar="FILE", type=Path, default=None, help="a TOML or JSON file of settings"
    )
    for group in GROUPS:
        section = parser.add_argument_group(TITLES.get(group, group))
        for leaf in leaf_table().values():
            if leaf.bag == group:
                section.add_argument(leaf.flag, dest=leaf.name, **_options(leaf))


def read_namespace(namespace: argparse.Namespace) -> tuple[ServerArgs, dict[str, InputSource]]:
    """The args, and where each given field came from; its keys are the given fields. Raises ConfigError
    for what the file or a value does wrong."""
    found = vars(namespace)
    typed = convert_all({name: found[name] for name in leaf_table() if name in found})
    path = found.get("config")
    from_file = {} if path is None else read_config_file(path)
    sources: dict[str, InputSource] = dict.fromkeys(from_file, "file")
    sources |= dict.fromkeys(typed, "typed")
    return ServerArgs(**(from_file | typed)), sources


def _options(leaf: Leaf) -> dict[str, Any]:
    """What argparse needs to know of a field."""
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(leaf)}
    if leaf.kind is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if leaf.choices:
        return options | {"choices": leaf.choices}
    if typing.get_origin(leaf.kind) is tuple:
        if typing.get_args(leaf.kind)[0] is int:
            return options | {"nargs": "+", "metavar": "N", "type": _count}
        return options | {"nargs": "+", "metavar": "WORD"}
    metavar = {int: "N", float: "X"}.get(leaf.kind, "TEXT")
    return options | {"type": leaf.kind, "metavar": metavar}


def _count(word: str) -> int:
    """A number; "none" is 0."""
    return 0 if word == "none" else int(word)


def _help(leaf: Leaf) -> str:
    """Help with its default, unless the default is to be decided or the help says it."""
    text = leaf.help.replace("%", "%%")
    if leaf.default is None or leaf.default == () or "default:" in text:
        return text
    shown = (
        {True: "on", False: "off"}.get(leaf.default, leaf.default)
        if leaf.kind is bool
        else leaf.default
    )
    return f"{text} (default: {shown})"
