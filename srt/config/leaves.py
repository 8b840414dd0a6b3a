"""The fields of ServerArgs as a table: type, bag, help, limits. Everything generic reads it: flags, the
config file, the bags, overrides."""

from __future__ import annotations

import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import msgspec

from srt.config.args import ServerArgs
from srt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One field of `ServerArgs`, with what `typed` says of it."""

    name: str
    bag: str
    type: Any  # the annotation of the field: int, str | None, tuple[str, ...]
    default: Any
    help: str
    choices: tuple[str, ...]
    least: float | None
    most: float | None
    at_load: bool
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def words(self, value: Any) -> str:
        """What is typed for `value`: --flag value, or --flag and --no-flag of a switch."""
        if self.kind is bool and isinstance(value, bool):
            return self.flag if value else self.flag.replace("--", "--no-", 1)
        return f"{self.flag} {value}"

    @property
    def kind(self) -> Any:
        """The type without its None: int for `int | None`."""
        if isinstance(self.type, types.UnionType):
            return next(part for part in typing.get_args(self.type) if part is not type(None))
        return self.type


@functools.cache
def leaf_table() -> Mapping[str, Leaf]:
    """Every field of ServerArgs by name."""
    hints = typing.get_type_hints(ServerArgs)
    table = {}
    for field in fields(ServerArgs):
        assert field.default is not MISSING, field.name
        table[field.name] = Leaf(
            name=field.name,
            type=hints[field.name],
            default=field.default,
            **field.metadata,
        )
    return types.MappingProxyType(table)


def find_leaf(name: str) -> Leaf:
    """Raises ConfigError for an unknown name, with the nearest one that exists."""
    leaf = leaf_table().get(name)
    if leaf is None:
        raise ConfigError(f"there is no setting {name!r}{suggest(name, leaf_table())}")
    return leaf


def suggest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" with the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def convert(leaf: Leaf, value: Any, wanted: Any = None) -> Any:
    """`value` as the leaf's type (or as `wanted`, the stricter type of the bag's leaf); a list becomes
    the tuple it stands for and 8 becomes 8.0. Raises ConfigError naming the flag, the value and what is
    allowed."""
    shown = "a secret" if leaf.secret else repr(value)
    try:
        result = msgspec.convert(value, leaf.type if wanted is None else wanted)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{leaf.flag} cannot be {shown}: {error}") from None
    if leaf.choices and isinstance(result, str) and result not in leaf.choices:
        raise ConfigError(
            f"{leaf.flag} cannot be {shown}; allowed: {', '.join(leaf.choices)}"
            + suggest(result, leaf.choices)
        )
    if leaf.least is not None and result is not None and not result >= leaf.least:
        raise ConfigError(f"{leaf.flag} cannot be {shown}; the smallest allowed is {leaf.least:g}")
    if leaf.most is not None and result is not None and not result <= leaf.most:
        raise ConfigError(f"{leaf.flag} cannot be {shown}; the largest allowed is {leaf.most:g}")
    return result


def convert_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """Every name known and every value of its type, or ConfigError for the first that is not."""
    return {name: convert(find_leaf(name), value) for name, value in values.items()}
