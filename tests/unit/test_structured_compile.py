"""What is refused, why, and that what is accepted gives valid output."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from grammar_vocab import TABLE, schema, start, tokenizer, write

from srt.errors import InvalidRequest, InvalidSchema
from srt.structured.compile import MAX_CHOICES, compile_grammar
from srt.structured.recursion import find_endless
from srt.structured.service import Compiler, ThreadedGrammars
from srt.structured.tokens import TokenTable
from srt.wire.params import Grammar, GrammarKind

MADE = tokenizer()
NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}


NULL = {"type": "null"}
LIST = {"type": "array", "items": {"$ref": "#"}, "minItems": 1}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def any_of(depth: int) -> Any:
    return {"type": "null"} if depth == 0 else {"anyOf": [any_of(depth - 1)] * 4}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"type": "objekt"}, "objekt"),
        ({"type": "object", "properties": {"n": "int"}}, "must be an object or boolean"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "https://example.org/s"}, "example.org"),
        ({"$ref": "#"}, "without end"),
        ({**NODE, "required": ["next"]}, "without end"),
        ({"enum": []}, "empty"),
        ({"not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "if"),
        ({"type": "string", "format": "shoe-size"}, "shoe-size"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        (any_of(8), "too large"),
    ],
)
def test_h3_bad_schemas_are_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        compile_grammar(schema(value), MADE)
    assert words in caught.value.message and len(caught.value.message) < 400
    assert caught.value.param == "response_format" and caught.value.code == "invalid_schema"


@pytest.mark.parametrize("text", ["{", '"{"', "[]", "7", "", "[" * 5000, '{"a":' * 5000])
def test_h3_what_is_no_schema_at_all(text: str) -> None:
    with pytest.raises(InvalidSchema, match="response_format: the schema"):
        compile_grammar(Grammar(kind="json_schema", text=text), MADE)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "[", "unclosed"),
        ("regex", "a\\", "backslash"),
        ("regex", r"\ba", "lookaround"),
        ("choice", "{}", "list of strings"),
        ("choice", "[1]", "list of strings"),
        ("choice", "[]", "1 to"),
        ("choice", '["a", ""]', "none of them empty"),
        ("choice", json.dumps(["a"] * (MAX_CHOICES + 1)), "1 to"),
        ("lark", "start: b", "unknown name"),
        ("lark", "hello", "Expected"),
        ("lark", "start: start", "no text can satisfy it"),
        ("lark", '%llguidance {"no_forcing": false}\nstart: "a"', "engine's to set"),
    ],
)
def test_other_kinds_are_refused_in_their_own_name(
    kind: GrammarKind, text: str, words: str
) -> None:
    with pytest.raises(InvalidSchema) as caught:
        start(kind, text, MADE)
    field = "grammar" if kind == "lark" else kind
    assert words in caught.value.message and caught.value.param == field


@pytest.mark.parametrize(
    "text", ["(x|y)*x(x|y){24}", "(([a-z]{1,80}){1,80}){1,80}", "(.*a.{20}){50}", ".*a.{1000}"]
)
def test_h4_hostile_patterns_have_a_bound(text: str) -> None:
    """They either work or end in an error of their own; automata and steps are counted."""
    try:
        found = [write(start("regex", text, MADE), seed, limit=60) for seed in range(2)]
    except InvalidSchema as error:
        assert error.param == "regex"
    else:
        assert len(found) == 2


def test_h4_any_of_twelve_deep_is_small() -> None:
    levels: dict[str, Any] = {"d0": {"type": "boolean"}}
    for depth in range(1, 13):
        levels[f"d{depth}"] = {"anyOf": [{"$ref": f"#/$defs/d{depth - 1}"}] * 4}
    matcher = compile_grammar(schema({"$defs": levels, "$ref": "#/$defs/d12"}), MADE)
    assert write(matcher, 1) in ("true", "false")


@pytest.mark.parametrize(
    ("value", "endless"),
    [
        (NODE, None),
        ({**NODE, "required": ["next"]}, "#"),
        ({"type": "array", "items": {"$ref": "#"}}, None),
        (LIST, "#"),
        ({**LIST, "prefixItems": [NULL]}, None),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "#"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, None),
        ({"oneOf": [{"$ref": "#"}, {"allOf": [{"type": "null"}, {"$ref": "#"}]}]}, "#"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}}, "#/$defs/a~1b"),
        ({**ref("a"), "$defs": {"a": {"anyOf": [ref("b")]}, "b": {"const": 1}}}, None),
        ({"properties": {"x": ref("x")}, "required": ["x"], "$defs": {"x": ref("x")}}, None),
    ],
)  # fmt: skip
def test_schemas_that_require_themselves(value: dict[str, Any], endless: str | None) -> None:
    """The last one may be a number, say: `required` speaks of objects only."""
    assert find_endless(value) == endless


def test_looking_for_recursion_is_bounded() -> None:
    """A chain in the worst order: every round finds one more."""
    chain: dict[str, Any] = {f"n{i}": {"$ref": f"#/$defs/n{i + 1}"} for i in range(3000)}
    chain["n3000"] = {"type": "null"}
    assert find_endless({"$ref": "#/$defs/n0", "$defs": chain}) is None


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    assert isinstance(value, dict) and {"name", "age"} <= set(value) <= set(PERSON["properties"])  # type: ignore[arg-type]
    assert isinstance(value["name"], str) and len(value["name"]) <= 6
    assert type(value["age"]) is int and 0 <= value["age"] <= 120
    assert len(value.get("tags", [])) <= 3 and set(value.get("tags", [])) <= {"x", "y"}
    assert value.get("note") in (None, True, False)
    return True


def test_random_texts_of_a_schema_satisfy_it() -> None:
    found = [write(compile_grammar(schema(PERSON), MADE), seed, limit=2000) for seed in range(60)]
    texts = [text for text in found if text is not None]
    assert len(texts) >= 50 and len(set(texts)) == len(texts)
    assert all(is_person(json.loads(text)) for text in texts)


def test_spaces_come_to_an_end() -> None:
    """A model that only writes spaces is made to go on."""
    matcher = compile_grammar(Grammar(kind="json_object"), MADE)
    matcher.accept(ord("{"))
    for _ in range(200):
        if not matcher.mask()[32 // 8] & 1:
            break
        matcher.accept(32)
    else:
        pytest.fail("it may write spaces for ever")


def test_verdicts_come_from_the_thread() -> None:
    loads = []

    def load() -> TokenTable:
        loads.append(1)
        return TABLE

    compiler = Compiler(load, "test")
    try:
        for _ in range(2):
            with pytest.raises(InvalidSchema, match="objekt"):
                compiler.check(schema({"type": "objekt"})).result(20)
            compiler.check(schema(PERSON)).result(20)
        assert loads == [1]
    finally:
        compiler.close()


def test_a_model_without_an_end_has_no_grammars() -> None:
    table = TokenTable(pieces=TABLE.pieces, special_ids=[], end_ids=[])
    compiler = Compiler(lambda: table, "test")
    try:
        with pytest.raises(InvalidRequest, match="no end token"):
            compiler.check(Grammar(kind="json_object")).result(20)
    finally:
        compiler.close()


def test_no_request_uses_up_what_the_next_one_needs() -> None:
    """The automata of this pattern grow with every new text, and their size is limited."""
    grammar = Grammar(kind="regex", text="[ab]*a[ab]{200}c")
    grammars = ThreadedGrammars(lambda: TABLE)
    draw = random.Random(0)
    try:
        for uid in range(25):
            grammars.open(uid, grammar)
            [opened] = grammars.ready(20)
            assert opened.error is None
            for _ in range(20):
                assert grammars.follow(uid, draw.choices(b"ab", k=30)) is not None
            grammars.forget(uid)
    finally:
        grammars.close()


def test_live_grammars_are_apart_and_forgotten() -> None:
    grammars = ThreadedGrammars(lambda: TABLE)
    try:
        for uid, text in ((1, "ab"), (2, "ab"), (3, "[")):
            grammars.open(uid, Grammar(kind="regex", text=text))
        grammars.open(4, Grammar(kind="regex", text="ba"))
        grammars.forget(4)
        found = {}
        while len(found) < 3:
            found |= {opened.uid: opened for opened in grammars.ready(20)}
        assert isinstance(found[3].error, InvalidSchema)
        assert found[1].mask == found[2].mask and found[1].error is None
        assert grammars.follow(1, [ord("a")]) != found[1].mask
        assert grammars.follow(1, [ord("b")]) is None
        assert grammars.follow(2, list(b"ab")) is None
        for uid in (1, 1, 2, 3, 4):
            grammars.forget(uid)
        assert grammars.ready(0) == []
    finally:
        grammars.close()
