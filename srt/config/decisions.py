"""The notebook of one `resolve`: what was asked, what is decided, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from srt.config.args import ServerArgs
from srt.config.bags import show
from srt.config.leaves import leaf_table
from srt.config.trail import InputSource, TrailEntry

T = TypeVar("T")


class Decisions:
    """One trail entry per field, once. `values` is by field of ServerArgs."""

    def __init__(self, args: ServerArgs, sources: Mapping[str, InputSource]) -> None:
        self.args = args
        self.values: dict[str, Any] = {}
        self.trail: list[TrailEntry] = []
        self._sources = sources

    def choose(
        self, name: str, typed: T | None, decided: T, reason: str, *, source: str = "rule"
    ) -> T:
        """The user's value if there is one, else the decided one with its reason."""
        if typed is not None:
            return self.take(name, typed)
        return self.decide(name, decided, reason, source=source)

    def take(self, name: str, value: T, flag: str | None = None) -> T:
        """The user's value, given with `flag` if not with the field's own."""
        return self._put(name, value, *self.asked(flag or name), None)

    def asked(self, flag: str) -> tuple[str, str]:
        """Source and reason of a value that the user gave."""
        origin = self._sources.get(flag, "typed")
        leaf, value = leaf_table()[flag], getattr(self.args, flag)
        words = leaf.words(value) if leaf.kind is bool else leaf.flag
        reason = f"asked for with {words}" if origin == "typed" else f"{flag} in the config file"
        return origin, reason

    def origin(self, name: str) -> InputSource | None:
        """Where the user gave this field, be it with its default; None: nowhere."""
        return self._sources.get(name)

    def decide(self, name: str, value: T, reason: str, *, source: str = "rule") -> T:
        """The rule's value, whatever the user gave; the trail shows what it replaced."""
        given = getattr(self.args, name)
        return self._put(name, value, source, reason, None if given == value else given)

    def default(self, name: str) -> None:
        """A field that nothing decides: what the user gave, else its default."""
        leaf, value = leaf_table()[name], getattr(self.args, name)
        if name in self._sources or value != leaf.default:
            self.take(name, value)
        else:
            off = value is None or value is False
            self.decide(name, value, "off unless asked for" if off else f"default of {leaf.flag}")

    def _put(self, name: str, value: T, source: str, reason: str, replaced: Any) -> T:
        assert name not in self.values, f"{name} was decided twice"
        leaf = leaf_table()[name]
        self.values[name] = value
        scope = "target" if leaf.bag == "runner" else leaf.bag
        self.trail.append(
            TrailEntry(
                field=f"{scope}.{name}",
                value=show(leaf, value),
                source=source,
                reason=reason,
                replaced=show(leaf, replaced),
            )
        )
        return value
