"""Which words a schema may use, and where its subschemas stand.

The grammar library leaves a word that it does not know without effect, so a misspelt `requierd` would
be a promise that nobody keeps. Here it is refused with its place. The words are those of JSON Schema,
draft 4 to 2020-12: https://json-schema.org/draft/2020-12/json-schema-core, -validation.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name to schema
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLES = ("additionalProperties", "items", "additionalItems")  # `items` may also be a list
PLAIN = (
    "type", "enum", "const", "required", "$ref", "format", "pattern", "minLength", "maxLength",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems",
    "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
# Words that say something about a value without restricting it; `x-...` too.
ANNOTATIONS = (
    "$schema", "$id", "id", "$anchor", "$comment", "$vocabulary", "title", "description", "default",
    "examples", "example", "deprecated", "readOnly", "writeOnly", "contentEncoding",
    "contentMediaType", "contentSchema", "discriminator", "xml", "externalDocs",
)  # fmt: skip
UNSERVED = (
    "if", "then", "else", "not", "contains", "minContains", "maxContains", "uniqueItems",
    "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
    "$recursiveAnchor",
)  # fmt: skip
SERVED = frozenset((*MAPS, *LISTS, *SINGLES, *PLAIN))
_FREE = SERVED | frozenset(ANNOTATIONS)
_HINTS = {"nullable": 'write "type": ["string", "null"]'}


class SchemaFault(ValueError):
    """What is wrong with a schema, with its place in it."""


def check_keywords(root: dict[str, Any]) -> None:
    """Raises SchemaFault for the first word that would have no effect, and for a subschema that is none.
    `uniqueItems: false` asks for nothing and is taken out of `root`."""
    containers = {ref[2:].partition("/")[0] for _, ref in local_references(root)}
    for path, node in walk(root):
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise SchemaFault(f"the schema at {show(path)} must be an object or boolean")
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        for key in node.keys() - _FREE:
            if key.startswith("x-") or (node is root and key in containers):
                continue
            place = f"{show(key)} at {show(path)}"
            if key in UNSERVED:
                raise SchemaFault(f"{place} cannot be enforced here; leave it out")
            raise SchemaFault(f"{place} is no word of JSON Schema{_suggest(key)}")


def walk(root: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every subschema with its place, whatever it is; also what a `$ref` points to elsewhere."""
    stack: list[tuple[str, Any]] = [("#", root)]
    stack += [(ref, target) for target, ref in local_references(root)]
    seen: set[int] = set()
    while stack:
        path, node = stack.pop()
        if id(node) in seen and isinstance(node, dict):
            continue
        seen.add(id(node))
        yield path, node
        if isinstance(node, dict):
            stack.extend(_children(path, node))


def _children(path: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in MAPS:
        group = node.get(key)
        if isinstance(group, dict):
            yield from ((f"{path}/{key}/{name}", child) for name, child in group.items())
    for key in (*LISTS, "items"):
        group = node.get(key)
        if isinstance(group, list):
            yield from ((f"{path}/{key}/{i}", child) for i, child in enumerate(group))
    for key in SINGLES:
        if key in node and not (key == "items" and isinstance(node[key], list)):
            yield f"{path}/{key}", node[key]


def local_references(root: dict[str, Any]) -> list[tuple[Any, str]]:
    """What every `$ref` of the form `#/...` in the text points to, and the reference. Those that point
    nowhere are left out: the library refuses them by name."""
    stack: list[Any] = [root]
    found: dict[str, Any] = {}
    while stack:
        at = stack.pop()
        if isinstance(at, dict):
            reference = at.get("$ref")
            if isinstance(reference, str) and reference not in found:
                target = resolve(reference, root)
                if target is not None:
                    found[reference] = target
            stack.extend(at.values())
        elif isinstance(at, list):
            stack.extend(at)
    return [(target, reference) for reference, target in found.items()]


def resolve(reference: str, root: dict[str, Any]) -> Any:
    """What `#` or `#/a/b` points to; None if that is nothing or the reference is of another kind."""
    head, _, path = reference.partition("#")
    if head or (path and not path.startswith("/")):
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


def show(text: str) -> str:
    """A word or a place, short enough for a message."""
    return text if len(text) <= 80 else f"...{text[-77:]}"


def _suggest(key: str) -> str:
    if key in _HINTS:
        return f"; {_HINTS[key]}"
    near = difflib.get_close_matches(key[:40], SERVED, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""
