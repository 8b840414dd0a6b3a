"""A real, random model made to write what grammars say: valid whatever it likes to say, and the same in
every setting. Its vocabulary is the printable ASCII characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from request_set import END, VOCAB, ask, words
from whole_engine import Outcome, Setting, engine, expect_equal

from srt.config.facts import ModelFacts
from srt.scheduler.balance import Balance
from srt.scheduler.pace import Pace
from srt.structured.service import ThreadedGrammars
from srt.structured.tokens import TokenTable
from srt.wire.messages import Work
from srt.wire.params import Grammar

FIRST = END + 1
PIECES = [b""] * FIRST + [bytes([32 + i]) for i in range(VOCAB - FIRST)]
TABLE = TokenTable(pieces=PIECES, special_ids=[0, 1, END], end_ids=[END])
NUM_SEEDS = 40

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[a-z]{2,5}$"},
        "size": {"type": "integer", "minimum": -5, "maximum": 99},
        "kind": {"enum": ["big", "small", None]},
        "parts": {
            "type": "array",
            "items": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/point"}]},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["id", "size", "parts"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
GRAMMARS = (
    Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
    Grammar(kind="regex", text=r"(GET|PUT) /[a-z]{1,8}(\?[a-z]=[0-9]{1,3})?"),
    Grammar(kind="choice", text='["north", "north-east", "east"]'),
)


def check_object(text: str) -> None:
    found = json.loads(text)
    assert {"id", "size", "parts"} <= set(found) <= {"id", "size", "parts", "kind"}
    assert re.fullmatch("[a-z]{2,5}", found["id"])
    assert type(found["size"]) is int and -5 <= found["size"] <= 99
    assert found.get("kind") in ("big", "small", None)
    assert 1 <= len(found["parts"]) <= 2
    for part in found["parts"]:
        assert part in (True, False) or (set(part) == {"x"} and 0 <= part["x"] <= 9)


def check(request: Work, outcome: Outcome) -> None:
    grammar = request.params.grammar
    assert grammar is not None
    text = b"".join(PIECES[token] for token in outcome.tokens).decode()
    if outcome.end.reason == "length":
        return
    assert outcome.end.reason == "stop"
    if grammar.kind == "json_schema":
        check_object(text)
    elif grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text)
    else:
        assert text in json.loads(grammar.text)


@pytest.fixture(scope="module")
def grammars() -> Iterator[ThreadedGrammars]:
    made = ThreadedGrammars(lambda: TABLE)
    yield made
    made.close()


def requests(**more: Any) -> list[Work]:
    options: dict[str, Any] = {"temperature": 1.0, "logprobs": 2, **more}
    return [
        ask(uid, words(uid % 5, 12 + uid % 9), 120, seed=uid, grammar=grammar, **options)
        for uid, grammar in enumerate(GRAMMARS * NUM_SEEDS)
    ]


@pytest.fixture(scope="module")
def expected(facts: ModelFacts, grammars: ThreadedGrammars) -> dict[int, Outcome]:
    with engine(facts, Setting(), grammars=grammars) as made:
        return made.run(requests())


def test_whatever_it_draws_is_valid(expected: dict[int, Outcome]) -> None:
    texts: dict[str, set[tuple[int, ...]]] = {}
    num_cut = 0
    for request in requests():
        outcome = expected[request.uid]
        check(request, outcome)
        num_cut += outcome.end.reason == "length"
        assert request.params.grammar is not None
        texts.setdefault(request.params.grammar.kind, set()).add(tuple(outcome.tokens))
    assert num_cut <= NUM_SEEDS // 2
    assert [len(texts[g.kind]) for g in GRAMMARS] >= [NUM_SEEDS - 2, NUM_SEEDS - 2, 3]


@pytest.mark.parametrize(
    "setting",
    [
        Setting(radix=True, depth=1, chunk=16),
        Setting(radix=True, depth=1, page_size=1, kv_tokens=420, chunk=5, max_running=5),
        Setting(radix=True, depth=1, chunk=16, drafter="ngram"),
    ],
    ids=["usual", "tight", "speculating"],
)
def test_settings_do_not_change_it(
    facts: ModelFacts, grammars: ThreadedGrammars, expected: dict[int, Outcome], setting: Setting
) -> None:
    todo = requests()
    with engine(facts, setting, grammars=grammars) as made:
        found = made.run(todo[:40], todo[40:])
    expect_equal(found, expected)


@pytest.mark.parametrize(("topk", "depth"), [(1, 0), (1, 1), (3, 1)])
def test_guesses_follow_the_grammar(
    topk: int,
    depth: int,
    facts: ModelFacts,
    grammars: ThreadedGrammars,
    expected: dict[int, Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guesses that are right all the way to the end of the text, past which nothing may come."""
    monkeypatch.setattr(Pace, "learn", lambda *_: None)
    monkeypatch.setattr(Balance, "pays", lambda *_: True)
    todo = requests()[:60]
    answers = [[*each.token_ids, *expected[each.uid].tokens] for each in todo]
    size = 4 if topk == 1 else 7
    setting = Setting(
        radix=True, depth=depth, chunk=16, drafter="eagle3", topk=topk, draft_tokens=size
    )
    with engine(facts, setting, grammars=grammars, answers=answers) as made:
        found = made.run(todo[:20], todo[20:])
    expect_equal(found, {each.uid: expected[each.uid] for each in todo})
    usages = [outcome.end.usage for outcome in found.values()]
    drafted, accepted = (
        sum(u.drafted_tokens for u in usages),
        sum(u.accepted_tokens for u in usages),
    )
    assert accepted > (0.7 if topk == 1 else 0.2) * drafted > 100


def test_a_look_ahead_takes_nothing(grammars: ThreadedGrammars) -> None:
    word = [PIECES.index(bytes([letter])) for letter in b"north"]
    grammars.open(900, GRAMMARS[2])
    while not (opened := grammars.ready(1.0)):
        pass
    assert opened[0].error is None
    assert grammars.peek(900, word[:2]) == grammars.peek(900, word[:2]) != opened[0].mask
    mask = grammars.follow(900, word[:2])
    assert mask == grammars.peek(900, []) and mask is not None
    end = PIECES.index(b"-")
    assert grammars.peek(900, word[2:]) is not None  # north, or north-east
    east = [end, *(PIECES.index(bytes([letter])) for letter in b"east")]
    assert grammars.peek(900, [*word[2:], *east]) is None
    assert grammars.follow(900, word[2:]) is not None
    grammars.forget(900)
    assert grammars.peek(900, word) is None


def test_greedy_and_odd_rules(facts: ModelFacts, grammars: ThreadedGrammars) -> None:
    """Penalties, truncation, bans and least lengths may fight the grammar; it stays valid."""
    rules: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 2.0},
        {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"presence_penalty": 2.0},
        {"frequency_penalty": -2.0, "temperature": 2.0}, {"min_tokens": 100},
        {"ignore_eos": True}, {"logit_bias": {FIRST: 100.0}}, {"logit_bias": {FIRST + 1: -100.0}},
    ]  # fmt: skip
    todo = []
    for uid, rule in enumerate(rules * 2):
        options = {"temperature": 1.0, **rule}
        todo.append(ask(uid, words(1, 20), 150, seed=uid, grammar=GRAMMARS[uid % 2], **options))
    with engine(facts, Setting(radix=True, depth=1), grammars=grammars) as made:
        found = made.run(todo)
    for request in todo:
        check(request, found[request.uid])
    assert sum(outcome.end.reason == "stop" for outcome in found.values()) > len(todo) // 2
