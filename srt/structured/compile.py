"""From a request's grammar to a matcher, or to the reason why it cannot be served.

All kinds become one text in the library's dialect of Lark. Nothing is forced: a mask holds every token
that keeps the output valid, so how the model cuts text into tokens is left to the model.

The library builds its automata lazily, counts the work of every step, and lets other threads run
meanwhile. The limits below bound one step to some milliseconds and the automata of one grammar to some
20 MB, whatever the grammar says; what passes them is refused, or ends its own request.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from srt.errors import InvalidSchema
from srt.structured.keywords import SchemaFault, check_keywords
from srt.structured.matcher import LazyMatcher
from srt.structured.one_of import replace_one_of
from srt.structured.recursion import find_endless
from srt.wire.params import Grammar

STEP_FUEL = 100_000  # per mask; the library's unit, about 14,000 a millisecond
MAX_STATES = 20_000  # of one grammar's automata, 1 to 2 kB each
MAX_SYMBOLS = 200_000
ERROR_CHARS = 300
MAX_CHOICES = 4096

# Spaces between the parts of JSON: enough for any indentation, and an end to a model that writes
# nothing but spaces.
_SPACES = r"[ \n\r\t]{1,64}"
_OPTIONS = "x-guidance"  # the key under which the library reads its own options from a schema
_HEAD = '%llguidance {"no_forcing": true}\n'
_EMBEDDED = re.compile(r"%json\s*")
_ECHO = re.compile(r"\s*\d+ \||\s*\^+\s*$")  # lines of an error that quote the grammar
_PLACE = re.compile(r"at \d+\(\d+\): |failed to compile JSON schema: ")


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LazyMatcher:
    """A matcher at its start, with its first mask computed once. Raises InvalidSchema with the
    library's reason."""
    limits = LLParserLimits(
        step_lexer_fuel=STEP_FUEL,
        max_lexer_states=MAX_STATES,
        max_grammar_size=MAX_SYMBOLS,
        verbose_errors=False,
    )
    text = _HEAD + write_lark(grammar)
    inner = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if inner.is_error():
        raise refusal(grammar, shorten(inner.get_error()))
    matcher = LazyMatcher(inner, tokenizer.vocab_size, grammar)
    matcher.mask()
    return matcher


def write_lark(grammar: Grammar) -> str:
    """The grammar's rules, from `start` on."""
    match grammar.kind:
        case "json_object":
            return _write_schema({"type": "object"})
        case "json_schema":
            return _write_schema(_read_schema(grammar))
        case "regex":
            return f"start: /{_read_regex(grammar)}/"
        case "choice":
            return "start: " + " | ".join(_quote(text) for text in _read_choices(grammar))
        case "lark":
            if "%llguidance" in grammar.text:
                raise refusal(grammar, "%llguidance options are the engine's to set")
            return _read_embedded(grammar)


def _read_schema(grammar: Grammar) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(grammar.text.encode())
    except (msgspec.DecodeError, RecursionError) as error:
        raise refusal(grammar, f"the schema is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise refusal(grammar, "the schema must be a JSON object")
    return _check_schema(grammar, schema)


def _check_schema(grammar: Grammar, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema in words that the library serves; changes it in place."""
    if _OPTIONS in schema:
        raise refusal(grammar, f"{_OPTIONS} options are the engine's to set")
    try:
        check_keywords(schema)
        replace_one_of(schema)
    except SchemaFault as fault:
        raise refusal(grammar, str(fault)) from None
    except RecursionError:
        raise refusal(grammar, "the schema is nested too deeply") from None
    endless = find_endless(schema)
    if endless is not None:
        raise refusal(grammar, f"{endless} requires itself without end: no text can satisfy it")
    return schema


def _read_embedded(grammar: Grammar) -> str:
    """The grammar with its schemas checked. A `%json` without an object is the library's to judge."""
    text, parts, done = grammar.text, [], 0
    for found in _EMBEDDED.finditer(text):
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            continue
        if isinstance(schema, dict) and found.start() >= done:
            parts += [text[done : found.end()], json.dumps(_check_schema(grammar, schema))]
            done = end
    return "".join(parts) + text[done:]


def _write_schema(schema: dict[str, Any]) -> str:
    options = {_OPTIONS: {"whitespace_pattern": _SPACES}}
    return "start: %json " + msgspec.json.encode({**schema, **options}).decode()


def _read_regex(grammar: Grammar) -> str:
    pattern = grammar.text
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise refusal(grammar, "the pattern ends with a lone backslash")
    return regex_to_lark(pattern, "")


def _read_choices(grammar: Grammar) -> list[str]:
    try:
        choices = msgspec.json.decode(grammar.text.encode(), type=list[str])
    except msgspec.DecodeError as error:
        raise refusal(grammar, f"must be a list of strings: {error}") from None
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise refusal(grammar, f"must be 1 to {MAX_CHOICES} strings, none of them empty")
    return choices


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def refusal(grammar: Grammar, why: str) -> InvalidSchema:
    return InvalidSchema(f"{grammar.field}: {why}", param=grammar.field)


def shorten(error: str) -> str:
    """The library's reason without what it quotes of the grammar."""
    lines = [line.strip() for line in error.splitlines() if not _ECHO.match(line)]
    text = _PLACE.sub("", " ".join(line for line in lines if line and line != "<non-verbose/>"))
    return text if len(text) <= ERROR_CHARS else text[: ERROR_CHARS - 3] + "..."
