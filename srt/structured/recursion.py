"""Finds schemas that no finite text satisfies because they require themselves.

`{"properties": {"next": {"$ref": "#"}}, "required": ["next"]}` asks for an object in an object in an
object without end. The grammar library accepts it, and the model would write until it is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

VISITS = 50_000  # parts of a schema looked at before it is taken as it is; some 20 ms


def find_endless(schema: dict[str, Any]) -> str | None:
    """The reference that the root needs and that can never be complete, or None.

    A schema can be complete if all that it requires can: its `$ref`, the parts of `allOf`, its required
    properties, its first `minItems` items, and one of `anyOf` and of `oneOf`. That is a least fixed
    point over the references: start with none and add what can be complete until nothing is added.
    """
    targets = dict(_references(schema))
    search = _Search()
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
    """`complete` holds the references known to have an end."""

    def __init__(self) -> None:
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
        if isinstance(reference, str) and reference.startswith("#"):
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


def _references(root: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every `$ref` in the text with what it points to; those that point nowhere are left out: the
    library refuses them by name."""
    stack: list[Any] = [root]
    seen: set[str] = set()
    while stack:
        at = stack.pop()
        if isinstance(at, dict):
            reference = at.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                target = _resolve(reference, root)
                if target is not None:
                    yield reference, target
            stack.extend(at.values())
        elif isinstance(at, list):
            stack.extend(at)


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    head, _, path = reference.partition("#")
    if head:
        return None
    at: Any = root
    for part in path.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict):
            at = at.get(key)
        elif isinstance(at, list) and key.isdecimal() and int(key) < len(at):
            at = at[int(key)]
        else:
            return None
    return at


def _list(node: dict[str, Any], key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []
