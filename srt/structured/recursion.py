"""Finds schemas that no finite text satisfies because they require themselves.

`{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}` asks for an object in an object in an
object without end. The grammar library accepts it, and the model would write until it is cut off.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from srt.structured.keywords import local_references

VISITS = 50_000  # parts of a schema looked at before it is taken as it is; some 20 ms


def find_endless(schema: dict[str, Any]) -> str | None:
    """The reference that the root needs and that can never be complete, or None.

    A schema can be complete if all that it requires can: its `$ref`, the parts of `allOf`, its required
    properties, its first `minItems` items, and one of `anyOf` and of `oneOf`. That is a least fixed
    point over the references: start with none and add what can be complete until nothing is added.
    """
    targets = {reference: target for target, reference in local_references(schema)}
    search = _Search(targets.keys())
    try:
        while True:
            open_ones = targets.keys() - search.complete
            more = {ref for ref in open_ones if search.can_end(targets[ref])}
            if not more:
                break
            search.complete |= more
        if search.can_end(schema):
            return None
    except (_TooMuch, RecursionError):
        return None
    return next((ref for ref in targets if ref not in search.complete), None)


class _TooMuch(Exception):
    """The schema is too large to be judged."""


class _Search:
    """`complete` holds those of the `references` that are known to have an end."""

    def __init__(self, references: Collection[str]) -> None:
        self._references = references
        self.complete: set[str] = set()
        self._visits = 0

    def can_end(self, node: Any) -> bool:
        """Whether `node` can be complete, given the references that can. In doubt, yes."""
        self._visits += 1
        if self._visits > VISITS:
            raise _TooMuch
        if not isinstance(node, dict):
            return True
        reference = node.get("$ref")
        if isinstance(reference, str) and reference in self._references:
            if reference not in self.complete:
                return False
        for key in ("anyOf", "oneOf"):
            options = _list(node, key)
            if options and not any(map(self.can_end, options)):
                return False
        return all(map(self.can_end, _needed(node)))


def _needed(node: dict[str, Any]) -> list[Any]:
    """The parts that any value of this schema must satisfy or contain."""
    needed = list(_list(node, "allOf"))
    kind = node.get("type")
    properties = node.get("properties")
    if kind == "object" and isinstance(properties, dict):
        needed += [properties.get(key) for key in _list(node, "required") if isinstance(key, str)]
    least = node.get("minItems")
    if kind == "array" and isinstance(least, int):
        first = _list(node, "prefixItems")
        needed += first[: max(least, 0)]
        if least > len(first):
            needed.append(node.get("items"))
    return needed


def _list(node: dict[str, Any], key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []
