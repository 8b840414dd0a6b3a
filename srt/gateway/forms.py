"""The fields that say what the output must look like. Their checks make a `Grammar`; whether it can be
served is the engine's to say, which knows the vocabulary."""

from __future__ import annotations

from typing import Any

import orjson

from srt.errors import InvalidSchema
from srt.gateway.checks import Bounds, Rule, as_text, refuse, show
from srt.wire.params import Grammar, GrammarKind

FIELD = "response_format"
TYPES = ("text", "json_object", "json_schema")
SCHEMA_KEYS = ("name", "schema", "strict", "description")


def response_format() -> Rule:
    def check(name: str, value: Any, bounds: Bounds) -> Grammar | None:
        if not isinstance(value, dict):
            refuse(name, f"must be an object, not {show(value)}")
        kind = value.get("type")
        if kind not in TYPES:
            refuse(name, f"type must be one of {', '.join(TYPES)}, not {show(kind)}")
        allowed = ("type", "json_schema") if kind == "json_schema" else ("type",)
        _refuse_others(value, allowed, f"type {kind}")
        if kind == "text":
            return None
        if kind == "json_object":
            return Grammar(kind="json_object")
        return Grammar(kind="json_schema", text=_write_schema(value.get("json_schema")))

    return Rule(
        words="object: type text, json_object, or json_schema with json_schema.schema",
        schema={
            "type": "object",
            "properties": {"type": {"enum": list(TYPES)}, "json_schema": {"type": "object"}},
            "required": ["type"],
        },
        check=check,
    )


def _write_schema(value: Any) -> str:
    if not isinstance(value, dict):
        refuse(FIELD, f"json_schema must be an object with a schema, not {show(value)}")
    _refuse_others(value, SCHEMA_KEYS, "json_schema")
    for key in ("name", "description"):
        if value.get(key) is not None:
            _text_inside(value[key], f"json_schema.{key}")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        refuse(FIELD, f"json_schema.strict must be true or false, not {show(strict)}")
    schema = value.get("schema")
    if schema is None:
        raise InvalidSchema(f"{FIELD}: json_schema.schema is missing", param=FIELD)
    if not isinstance(schema, dict):
        raise InvalidSchema(
            f"{FIELD}: json_schema.schema must be an object, not {show(schema)}", param=FIELD
        )
    try:
        return orjson.dumps(schema).decode()
    except orjson.JSONEncodeError as error:  # the parser lets deeper values in than the writer out
        raise InvalidSchema(f"{FIELD}: json_schema.schema: {error}", param=FIELD) from None


def _refuse_others(value: dict[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key, item in value.items():
        if key not in allowed and item is not None:
            refuse(FIELD, f"{where} has no {show(key)}; known are {', '.join(allowed)}")


def _text_inside(value: Any, where: str) -> None:
    if not isinstance(value, str):
        refuse(FIELD, f"{where} must be a string, not {show(value)}")


def pattern(kind: GrammarKind) -> Rule:
    def check(name: str, value: Any, bounds: Bounds) -> Grammar:
        return Grammar(kind=kind, text=as_text(name, value))

    return Rule(words="string", schema={"type": "string"}, check=check)


def choices() -> Rule:
    def check(name: str, value: Any, bounds: Bounds) -> Grammar:
        if not isinstance(value, list):
            refuse(name, f"must be a list of strings, not {show(value)}")
        for position, item in enumerate(value):
            if not as_text(f"{name}[{position}]", item):
                refuse(f"{name}[{position}]", "must not be empty")
        if not value:
            refuse(name, "must not be empty")
        return Grammar(kind="choice", text=orjson.dumps(value).decode())

    schema = {"type": "array", "items": {"type": "string"}}
    return Rule(words="list of strings, none empty", schema=schema, check=check)
