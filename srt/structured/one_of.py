"""`oneOf` where its branches exclude each other: then it is `anyOf`, which a grammar can serve. Where
they may overlap, exactly one cannot be enforced token by token, and the schema is refused."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from srt.structured.keywords import SchemaFault, resolve, show, walk

VISITS = 10_000  # comparisons in one schema, 15 us each: 140 branches with a const of their own
DEPTH = 8
KINDS = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
Part = dict[str, Any]


def replace_one_of(root: dict[str, Any]) -> None:
    """In place. Raises SchemaFault naming the place and the two branches that may overlap."""
    judge = _Judge(root)
    for path, node in list(walk(root)):
        if not isinstance(node, dict) or "oneOf" not in node:
            continue
        branches = node.pop("oneOf")
        where = show(f"{path}/oneOf")
        if not isinstance(branches, list) or not branches:
            raise SchemaFault(f"{where} must be a list of schemas, not empty")
        for first, second in combinations(range(len(branches)), 2):
            # What stands beside oneOf holds in every branch.
            if not judge.are_apart([node, branches[first]], [node, branches[second]]):
                if judge.is_tired:
                    raise SchemaFault(f"{where}: too many branches to compare; write anyOf")
                raise SchemaFault(
                    f"{where}: branches {first} and {second} may both match; give each a type of its "
                    "own, or a required property with its own const; or write anyOf"
                )
        if "anyOf" in node:
            node["allOf"] = [*node.get("allOf", ()), {"anyOf": branches}]
        else:
            node["anyOf"] = branches


class _Judge:
    """Proves that no value satisfies two schemas. In doubt, it does not."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._visits = 0

    @property
    def is_tired(self) -> bool:
        return self._visits > VISITS

    def are_apart(self, one: list[Any], two: list[Any], depth: int = 0) -> bool:
        """`one` and `two` are lists of schemas that hold together."""
        self._visits += 1
        if depth > DEPTH or self.is_tired:
            return False
        if any(node is False for node in (*one, *two)):
            return True
        ours, theirs = self._parts(one), self._parts(two)
        shared = self._kinds(ours) & self._kinds(theirs)
        if not shared or _differ(_values(ours), _values(theirs)):
            return True
        if shared == {"object"} and self._differ_inside(ours, theirs, depth):
            return True
        return self._options_apart(ours, two, depth) or self._options_apart(theirs, one, depth)

    def _parts(self, nodes: list[Any]) -> list[Part]:
        """The schemas, what they refer to and their `allOf`, all of which must hold."""
        parts: list[Part] = []
        stack, seen = list(nodes), set()
        while stack:
            node = stack.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            parts.append(node)
            reference, every = node.get("$ref"), node.get("allOf")
            if isinstance(reference, str):
                stack.append(resolve(reference, self._root))
            if isinstance(every, list):
                stack.extend(every)
        return parts

    def _kinds(self, parts: list[Part]) -> frozenset[str]:
        """The types that a value of all parts may have."""
        kinds = KINDS
        for part in parts:
            named = part.get("type")
            names = [named] if isinstance(named, str) else named
            if isinstance(names, list):
                kinds &= {kind for name in names for kind in _kinds_named(name)}
        values = _values(parts)
        return kinds if values is None else kinds & {_kind_of(json.loads(text)) for text in values}

    def _differ_inside(self, ours: list[Part], theirs: list[Part], depth: int) -> bool:
        """Some property must be there and cannot satisfy both."""
        must = _required(ours) | _required(theirs)
        mine, yours = _properties(ours), _properties(theirs)
        if any(_is_closed_to(key, theirs) for key in _required(ours)):
            return True
        if any(_is_closed_to(key, ours) for key in _required(theirs)):
            return True
        return any(
            self.are_apart(mine[key], yours[key], depth + 1)
            for key in sorted(must & mine.keys() & yours.keys())
        )

    def _options_apart(self, parts: list[Part], others: list[Any], depth: int) -> bool:
        """Some part is a choice, and each of its options is apart from the others."""
        for part in parts:
            for key in ("anyOf", "oneOf"):
                options = part.get(key)
                if isinstance(options, list) and options:
                    if all(self.are_apart([option], others, depth + 1) for option in options):
                        return True
        return False


def _kinds_named(name: Any) -> tuple[str, ...]:
    return ("integer", "fraction") if name == "number" else (str(name),)


def _kind_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array"}
    return names.get(type(value), "object")


def _values(parts: list[Part]) -> set[str] | None:
    """The values that all parts allow, as texts; None if there is no such list."""
    found: set[str] | None = None
    for part in parts:
        for values in ([part["const"]] if "const" in part else None, part.get("enum")):
            if isinstance(values, list):
                texts = {json.dumps(_plain(value), sort_keys=True) for value in values}
                found = texts if found is None else found & texts
    return found


def _plain(value: Any) -> Any:
    """1.0 and 1 are the same number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _differ(ours: set[str] | None, theirs: set[str] | None) -> bool:
    return ours is not None and theirs is not None and not ours & theirs


def _required(parts: list[Part]) -> set[str]:
    lists = [part.get("required") for part in parts]
    return {key for keys in lists if isinstance(keys, list) for key in keys if isinstance(key, str)}


def _properties(parts: list[Part]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for part in parts:
        group = part.get("properties")
        for key, schema in group.items() if isinstance(group, dict) else ():
            found.setdefault(key, []).append(schema)
    return found


def _is_closed_to(key: str, parts: list[Part]) -> bool:
    """Some part allows no property of that name."""
    return any(
        part.get("additionalProperties") is False
        and "patternProperties" not in part
        and key not in (part.get("properties") or {})
        for part in parts
    )
