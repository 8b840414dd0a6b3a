"""Words of a schema that would have no effect are refused with their place; `oneOf` is served where its
branches exclude each other."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from grammar_vocab import PIECES, schema, start, tokenizer, write

from srt.errors import InvalidSchema
from srt.structured.compile import compile_grammar
from srt.structured.keywords import ANNOTATIONS, UNSERVED, SchemaFault, check_keywords
from srt.structured.one_of import replace_one_of

MADE = tokenizer()
END = len(PIECES) - 1


def prop(value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}}


def tagged(tag: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": tag}}, "required": ["kind"], **more}


def accepts(value: Any, text: str) -> bool:
    """Whether the grammar lets exactly this text be written."""
    matcher = compile_grammar(schema(value), MADE)
    for byte in text.encode():
        if not matcher.mask()[byte // 8] >> byte % 8 & 1:
            return False
        matcher.accept(byte)
    return matcher.is_finished or bool(matcher.mask()[END // 8] >> END % 8 & 1)


@pytest.mark.parametrize(
    ("value", "word", "place", "hint"),
    [
        ({"type": "object", "requierd": ["a"]}, "requierd", "#", "required"),
        (prop({"type": "integer", "minimun": 3}), "minimun", "#/properties/a", "minimum"),
        (prop({"type": "string", "nullable": True}), "nullable", "#/properties/a", '"null"'),
        ({"type": "array", "items": {"typ": "null"}}, "typ", "#/items", "type"),
        ({"type": "array", "items": [{"x": 1}]}, "x at", "#/items/0", ""),
        ({"type": "array", "prefixItems": [{}, {"lenght": 1}]}, "lenght", "#/prefixItems/1", ""),
        ({"anyOf": [{"allOf": [{"tpye": "null"}]}]}, "tpye", "#/anyOf/0/allOf/0", "type"),
        ({"additionalProperties": {"enums": []}}, "enums", "#/additionalProperties", "enum"),
        ({"patternProperties": {"^a": {"z": 1}}}, "z at", "#/patternProperties/^a", ""),
        ({"$defs": {"n": {"propertys": {}}}}, "propertys", "#/$defs/n", "properties"),
        ({"$ref": "#/c/n", "c": {"n": {"maxLen": 3}}}, "maxLen", "#/c/n", ""),
        ({"type": "null", "c": {"n": {}}}, "c at", "#", ""),
        *((prop({word: {}}), word, "#/properties/a", "leave it out") for word in UNSERVED),
    ],
)
def test_words_without_effect_are_refused(value: Any, word: str, place: str, hint: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        compile_grammar(schema(value), MADE)
    message = caught.value.message
    assert f"{word}" in message and f"at {place}" in message and hint in message, message
    assert caught.value.code == "invalid_schema" and len(message) < 400


@pytest.mark.parametrize("word", [*ANNOTATIONS, "x-order"])
def test_annotations_are_free(word: str) -> None:
    values: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#", "$anchor": "n"}
    values |= {"id": "a", "$id": "https://example.org/s", "$vocabulary": {}}
    assert accepts({"type": "null", word: values.get(word, "said")}, "null")


def test_names_of_properties_and_values_are_no_words() -> None:
    value = {
        "type": "object",
        "properties": {"requierd": {"const": {"minimun": 1}}, "$ref": {"enum": [{"x": {}}]}},
        "required": ["requierd"],
        "additionalProperties": False,
        "default": {"nonsense": 1},
    }
    assert accepts(value, '{"requierd":{"minimun":1}}')


def test_what_asks_for_nothing_is_taken_out() -> None:
    assert accepts({"type": "array", "uniqueItems": False, "items": {"const": 1}}, "[1,1]")


def test_references_into_other_places_are_followed() -> None:
    value = {"$ref": "#/components/schemas/N", "components": {"schemas": {"N": {"type": "null"}}}}
    assert accepts(value, "null") and not accepts(value, "1")


def test_embedded_schemas_are_checked_too() -> None:
    for text, word in (
        ('start: "x" %json {"type": "object", "requierd": []}', "requierd"),
        ('start: %json {"x-guidance": {"lenient": true}}', "engine's to set"),
        ('start: %json {"oneOf": [{"minimum": 1}, {"maximum": 5}]}', "may both match"),
    ):
        with pytest.raises(InvalidSchema, match=word) as caught:
            start("lark", text, MADE)
        assert caught.value.param == "grammar"
    made = start("lark", 'start: "<" %json {"oneOf": [{"const": 1}, {"const": 2}]} ">"', MADE)
    assert {write(made.copy(), seed) for seed in range(20)} == {"<1>", "<2>"}


APART: list[tuple[Any, str, str]] = [
    ({"oneOf": [{"const": 1}, {"const": 2}]}, "2", "3"),
    ({"oneOf": [{"enum": [1, "a"]}, {"const": "1"}]}, '"1"', "2"),
    ({"oneOf": [{"type": "integer"}, {"enum": [1.5, None]}]}, "1.5", "2.5"),
    ({"oneOf": [{"type": "null"}, {"type": ["boolean", "integer"]}]}, "true", '""'),
    ({"oneOf": [tagged("a"), tagged("b")]}, '{"kind":"b"}', '{"kind":"c"}'),
    ({"type": "object", "oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]}
                                  for i in range(3)]}, '{"k":2}', '{"k":3}'),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
      "$defs": {"a": tagged("a"), "b": tagged("b")}, "discriminator": {"propertyName": "kind"}},
     '{"kind":"a"}', "{}"),
    ({"oneOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
                 "additionalProperties": False},
                {"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"],
                 "additionalProperties": False}]}, '{"b":1}', '{"a":1,"b":1}'),
    ({"oneOf": [{"const": 1}, {"const": 2}], "anyOf": [{"const": 2}, {"const": 3}]}, "2", "1"),
    ({"oneOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"allOf": [{"const": 3}]}]}, "3", "4"),
    ({"oneOf": [tagged("a", properties={"kind": {"const": "a"}, "sub": {"oneOf": [
        {"type": "null"}, {"const": 7}]}}), tagged("b")]}, '{"kind":"a","sub":7}', '{"sub":7}'),
    ({"oneOf": [{"type": "string"}]}, '"x"', "1"),
    ({"oneOf": [False, {"const": 1}]}, "1", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "good", "bad"), APART)
def test_one_of_is_served_where_branches_exclude_each_other(
    value: Any, good: str, bad: str
) -> None:
    assert accepts(value, good) and not accepts(value, bad)


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"enum": [2, 1.0]}],
        [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}],
        [{"properties": {"k": {"const": 1}}, "required": ["k"]},
         {"properties": {"k": {"const": 2}}, "required": ["k"]}],  # 7 satisfies both
        [{"type": "object", "properties": {"k": {"const": i}}} for i in range(2)],  # so does {}
        [tagged("a"), tagged("a", required=[])],
        [{"type": "null"}, True],
        [{"type": "string", "minLength": 3}, {"type": "string", "maxLength": 2}],
        [{"$ref": "#"}, {"type": "null"}],
    ],
)  # fmt: skip
def test_one_of_is_refused_where_branches_may_overlap(branches: list[Any]) -> None:
    with pytest.raises(InvalidSchema) as caught:
        compile_grammar(schema({"$defs": {"x": {"oneOf": branches}}, "$ref": "#/$defs/x"}), MADE)
    message = caught.value.message
    assert "#/$defs/x/oneOf" in message and "branches 0 and 1" in message, message
    assert "coerce" not in message and "anyOf" in message


@pytest.mark.parametrize("branches", [[], None, {}, "a"])
def test_one_of_that_is_no_list(branches: Any) -> None:
    with pytest.raises(InvalidSchema, match="oneOf must be a list"):
        compile_grammar(schema({"oneOf": branches}), MADE)


def test_many_branches_have_a_bound() -> None:
    many = {"oneOf": [{"const": number} for number in range(3000)]}
    with pytest.raises(InvalidSchema, match="too many branches"):
        compile_grammar(schema(many), MADE)
    assert accepts({"oneOf": many["oneOf"][:100]}, "99")


VALUES: list[Any] = [None, True, 0, 1, 1.5, "a", "", [], {}, {"k": 1}, {"k": 2}, {"j": 1}]
VALUES += [{"k": 1, "j": 1}, {"k": None}]


def holds(node: Any, value: Any) -> bool:
    """A validator for what `random_schema` makes."""
    if isinstance(node, bool):
        return node
    kinds = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}
    named = node.get("type")
    if named == "integer":
        fits = type(value) is int
    elif named == "number":
        fits = type(value) in (int, float)
    else:
        fits = named is None or type(value) is kinds[named]
    same = [type(one) is type(value) and one == value for one in node.get("enum", [value])]
    if not fits or not any(same):
        return False
    if isinstance(value, dict):
        known = node.get("properties", {})
        if not set(node.get("required", ())) <= set(value):
            return False
        if not node.get("additionalProperties", True) and set(value) - set(known):
            return False
        if not all(holds(known[key], value[key]) for key in known.keys() & value.keys()):
            return False
    every = all(holds(part, value) for part in node.get("allOf", ()))
    return every and ("anyOf" not in node or any(holds(part, value) for part in node["anyOf"]))


def random_schema(draw: random.Random, depth: int = 0) -> Any:
    node: dict[str, Any] = {}
    if draw.random() < 0.6:
        node["type"] = draw.choice(["null", "boolean", "integer", "number", "string", "object"])
    if draw.random() < 0.3:
        node["enum"] = draw.sample(VALUES, 3)
    if depth < 2 and draw.random() < 0.6:
        node["properties"] = {
            key: random_schema(draw, depth + 1) for key in draw.sample("kj", draw.randint(1, 2))
        }
        node["required"] = draw.sample("kj", draw.randint(0, 2))
        if draw.random() < 0.3:
            node["additionalProperties"] = False
    for key in ("anyOf", "allOf"):
        if depth < 2 and draw.random() < 0.2:
            node[key] = [random_schema(draw, depth + 1) for _ in range(2)]
    return node


def test_what_counts_as_apart_shares_no_value() -> None:
    """Random pairs: whenever they are taken for apart, no value satisfies both."""
    draw = random.Random(7)
    num_served = num_shared = 0
    for _ in range(3000):
        pair = [random_schema(draw), random_schema(draw)]
        both = [value for value in VALUES if holds(pair[0], value) and holds(pair[1], value)]
        num_shared += bool(both)
        try:
            replace_one_of({"oneOf": pair})
        except SchemaFault:
            continue
        num_served += 1
        assert not both, (pair, both)
    assert num_served > 500 and num_shared > 500


def test_wide_and_deep_schemas_pass_in_one_walk() -> None:
    wide = prop({"anyOf": [{"const": number} for number in range(5000)]})
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(2000):
        deep = {"items": deep}
    for value in (wide, deep):
        check_keywords(value)
    far: dict[str, Any] = {"typo": 1}
    for _ in range(50):
        far = {"items": far}
    with pytest.raises(SchemaFault, match="typo at [.][.][.]"):
        check_keywords(far)


def test_a_schema_is_json_again() -> None:
    value = {"oneOf": [tagged("a"), tagged("b")], "uniqueItems": False}
    check_keywords(value)
    replace_one_of(value)
    assert json.loads(json.dumps(value)) == {"anyOf": [tagged("a"), tagged("b")]}
