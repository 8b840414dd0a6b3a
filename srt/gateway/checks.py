"""What the value of a request field may be. A rule says it in words, as JSON schema, and in code.

A check gets the field's name, a value that is not null, and the bounds of this server. It returns the
value in the form the engine wants or raises `InvalidRequest` naming the field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from srt.errors import InvalidRequest
from srt.gateway.settings import GatewaySettings

_TOKEN_ID = re.compile(r"\d{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What this server allows: its settings and the model's vocabulary size."""

    settings: GatewaySettings
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A ceiling of this server, and the flag that sets it."""

    flag: str
    read: Callable[[GatewaySettings], int]


MAX_N = Limit(flag="--max-n", read=lambda settings: settings.max_n)
MAX_LOGPROBS = Limit(flag="--max-logprobs", read=lambda settings: settings.max_logprobs)
MAX_NAME_CHARS = Limit(flag="--max-name-chars", read=lambda settings: settings.max_name_chars)

Check = Callable[[str, Any, Bounds], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    words: str
    schema: dict[str, Any]
    check: Check


def refuse(name: str, message: str) -> NoReturn:
    raise InvalidRequest(f"{name}: {message}", param=name)


def pick_one(given: Iterable[str], names: tuple[str, ...]) -> str:
    """The one of `names` that is given, in the order of the request; a second one is at fault."""
    found = [name for name in given if name in names]
    if len(found) != 1:
        seen = f", not {' and '.join(found)}" if found else ""
        refuse(found[1] if found else names[0], f"give exactly one of {', '.join(names)}{seen}")
    return found[0]


def show(value: Any) -> str:
    """A value as it may stand in an error message: JSON, and short, whatever it is."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "something nested this deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."


def as_integer(name: str, value: Any) -> int:
    if type(value) is not int:
        refuse(name, f"must be an integer, not {show(value)}")
    return int(value)


def as_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        refuse(name, f"must be a string, not {show(value)}")
    return value


def as_token_ids(name: str, value: Any, bounds: Bounds) -> list[int]:
    """Checked in bulk first: prompts have many thousands of ids."""
    if not isinstance(value, list):
        refuse(name, f"must be a list of token ids, not {show(value)}")
    size = bounds.vocab_size
    if all(type(item) is int and 0 <= item < size for item in value):
        return value
    for position, item in enumerate(value):
        token = as_integer(f"{name}[{position}]", item)
        if not 0 <= token < size:
            refuse(f"{name}[{position}]", f"token id {token} is outside the vocabulary of {size}")
    return value


def number(low: float, high: float, *, above: bool = False) -> Rule:
    """A finite number in [low, high], or in (low, high] with `above`."""
    words = f"number in {'(' if above else '['}{low:g}, {high:g}]"

    def check(name: str, value: Any, bounds: Bounds) -> float:
        if type(value) not in (int, float):
            refuse(name, f"must be a {words}, not {show(value)}")
        inside = low < value <= high if above else low <= value <= high
        if not inside or not math.isfinite(value):
            refuse(name, f"must be a {words}, not {show(value)}")
        return float(value)

    key = "exclusiveMinimum" if above else "minimum"
    return Rule(words=words, schema={"type": "number", key: low, "maximum": high}, check=check)


def integer(low: int, high: int, limit: Limit | None = None) -> Rule:
    """An integer in [low, high]; `limit` may be a tighter end."""
    end = limit.flag if limit else "int64" if high >= 2**62 else f"{high}"
    words = f"integer from {low if low > -(2**62) else 'int64'} to {end}"

    def check(name: str, value: Any, bounds: Bounds) -> int:
        top = min(high, limit.read(bounds.settings)) if limit else high
        if type(value) is not int or not low <= value <= top:  # of over 64 bits it comes as a float
            is_above = type(value) in (int, float) and value > top
            why = f" ({limit.flag})" if limit and is_above else ""
            refuse(name, f"must be an integer from {low} to {top}{why}, not {show(value)}")
        return int(value)

    return Rule(words=words, schema={"type": "integer"}, check=check)


def boolean() -> Rule:
    def check(name: str, value: Any, bounds: Bounds) -> bool:
        if not isinstance(value, bool):
            refuse(name, f"must be true or false, not {show(value)}")
        return value

    return Rule(words="true or false", schema={"type": "boolean"}, check=check)


def text(limit: Limit | None = None) -> Rule:
    def check(name: str, value: Any, bounds: Bounds) -> str:
        found = as_text(name, value)
        most = limit.read(bounds.settings) if limit else len(found)
        if limit and len(found) > most:
            refuse(name, f"has {len(found)} characters; at most {most} are taken ({limit.flag})")
        return found

    words = f"string of at most {limit.flag} characters" if limit else "string"
    return Rule(words=words, schema={"type": "string"}, check=check)


def one_of(*allowed: str) -> Rule:
    def check(name: str, value: Any, bounds: Bounds) -> str:
        if value not in allowed:
            refuse(name, f"must be one of {', '.join(allowed)}, not {show(value)}")
        return as_text(name, value)

    return Rule(words=" or ".join(allowed), schema={"enum": list(allowed)}, check=check)


def identifier() -> Rule:
    """A name that is safe in headers, logs and URLs."""
    pattern = re.compile(r"[A-Za-z0-9._:~-]{1,128}")

    def check(name: str, value: Any, bounds: Bounds) -> str:
        found = as_text(name, value)
        if not pattern.fullmatch(found):
            refuse(name, "must be 1 to 128 letters, digits or any of . _ : ~ -")
        return found

    return Rule(words="1 to 128 of A-Z a-z 0-9 . _ : ~ -", schema={"type": "string"}, check=check)


def anything(words: str = "anything") -> Rule:
    return Rule(words=words, schema={}, check=lambda name, value, bounds: value)


def flags(*allowed: str) -> Rule:
    """An object whose keys are among `allowed` and whose values are booleans. Null is false."""
    words = "object of booleans: " + ", ".join(allowed)

    def check(name: str, value: Any, bounds: Bounds) -> frozenset[str]:
        if not isinstance(value, dict):
            refuse(name, f"must be an object, not {show(value)}")
        for key, item in value.items():
            if key not in allowed:
                refuse(f"{name}.{key[:60]}", f"unknown; known are {', '.join(allowed)}")
            if item is not None and not isinstance(item, bool):
                refuse(f"{name}.{key}", f"must be true or false, not {show(item)}")
        return frozenset(key for key, item in value.items() if item)

    properties = {key: {"type": "boolean"} for key in allowed}
    return Rule(words=words, schema={"type": "object", "properties": properties}, check=check)


def stop_strings() -> Rule:
    def check(name: str, value: Any, bounds: Bounds) -> list[str]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list):
            refuse(name, f"must be a string or a list of strings, not {show(value)}")
        settings = bounds.settings
        if len(items) > settings.max_stop:
            refuse(
                name,
                f"has {len(items)} strings; at most {settings.max_stop} are taken (--max-stop)",
            )
        for position, item in enumerate(items):
            where = name if isinstance(value, str) else f"{name}[{position}]"
            found = as_text(where, item)
            if not found:
                refuse(where, "must not be empty: every text contains the empty string")
            if len(found) > settings.max_stop_chars:
                most = settings.max_stop_chars
                refuse(where, f"is longer than {most} characters (--max-stop-chars)")
        return list(items)

    schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    return Rule(words="string or list of strings, none empty", schema=schema, check=check)


def stop_ids() -> Rule:
    def check(name: str, value: Any, bounds: Bounds) -> list[int]:
        found = as_token_ids(name, value, bounds)
        most = bounds.settings.max_stop_token_ids
        if len(found) > most:
            refuse(name, f"has {len(found)} ids; at most {most} are taken (--max-stop-token-ids)")
        return found

    schema = {"type": "array", "items": {"type": "integer"}}
    return Rule(words="list of token ids", schema=schema, check=check)


def token_bias() -> Rule:
    def check(name: str, value: Any, bounds: Bounds) -> dict[int, float]:
        if not isinstance(value, dict):
            refuse(name, f"must be an object from token id to number, not {show(value)}")
        most = bounds.settings.max_logit_bias
        if len(value) > most:
            refuse(name, f"has {len(value)} tokens; at most {most} are taken (--max-logit-bias)")
        biases: dict[int, float] = {}
        for key, bias in value.items():
            where = f"{name}.{key[:40]}"
            if not _TOKEN_ID.fullmatch(key) or not key.isascii():
                refuse(where, "the key must be a token id in decimal digits")
            token = int(key)
            if token >= bounds.vocab_size:
                size = bounds.vocab_size
                refuse(where, f"token id {token} is outside the vocabulary of {size}")
            biases[token] = _bias.check(where, bias, bounds)
        return biases

    schema = {"type": "object", "additionalProperties": {"type": "number"}}
    return Rule(words="object: token id to number in [-100, 100]", schema=schema, check=check)


def template_values() -> Rule:
    def check(name: str, value: Any, bounds: Bounds) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(name, f"must be an object, not {show(value)}")
        for key, item in value.items():
            if item is not None and not isinstance(item, (str, int, float, bool)):
                refuse(f"{name}.{key[:60]}", "must be a string, number, boolean or null")
        return value

    return Rule(words="object of scalars", schema={"type": "object"}, check=check)


_bias = number(-100.0, 100.0)
