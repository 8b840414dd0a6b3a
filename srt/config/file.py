"""The config file: TOML or JSON, the same names as the flags. What is typed wins over it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from srt.config.bags import BAGS
from srt.config.leaves import convert, find_leaf, leaf_table, suggest
from srt.errors import ConfigError

GROUPS = tuple(dict.fromkeys(leaf.bag for leaf in leaf_table().values()))


def read_config_file(path: Path) -> dict[str, Any]:
    """Field name to value. Keys stand alone or in a table named after their group, with `-` or `_`:
    `page-size = 16`, or `[schedule]` and below it `page_size = 16`. Raises ConfigError naming the file
    and the key."""
    values: dict[str, Any] = {}
    for key, value in _flatten(path, _parse(path)):
        name = key.replace("-", "_")
        if name not in leaf_table():
            near = suggest(name, [*leaf_table(), *GROUPS])
            raise ConfigError(f"{path}: there is no setting {key!r}{near}")
        if name in values:
            raise ConfigError(f"{path}: {key} is given twice")
        try:
            values[name] = convert(find_leaf(name), value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return values


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}") from None
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        if path.suffix == ".json":
            found = json.loads(text)
            if isinstance(found, dict):
                return found
            raise ConfigError(f"{path}: an object is needed, not {type(found).__name__}")
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    raise ConfigError(f"the config file {path} must end in .toml or .json")


def _flatten(path: Path, found: dict[str, Any]) -> list[tuple[str, Any]]:
    """Keys of the file and of its group tables, in order."""
    flat: list[tuple[str, Any]] = []
    names = {*GROUPS, *(bag.namespace for bag in BAGS)}
    for key, value in found.items():
        if not isinstance(value, dict):
            flat.append((key, value))
            continue
        if key not in names:
            raise ConfigError(f"{path}: there is no group {key!r}{suggest(key, names)}")
        for name, inner in value.items():
            leaf = leaf_table().get(name.replace("-", "_"))
            if leaf is not None and leaf.bag != key:
                raise ConfigError(f"{path}: {name} belongs to [{leaf.bag}], not to [{key}]")
            flat.append((name, inner))
    return flat
