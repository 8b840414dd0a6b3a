"""A mask holds exactly the tokens that keep the output valid: compared with counting them out."""

from __future__ import annotations

import json
import re

import pytest
from grammar_vocab import ENDS, PIECES, permitted, start, tokenizer, write
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.structured.matcher import LazyMatcher
from srt.structured.tokens import build_table, build_tokenizer
from srt.wire.params import GrammarKind

MADE = tokenizer()


def expect_exact(matcher: LazyMatcher, language: set[bytes]) -> int:
    """Walks through every state that the language has; returns how many."""
    todo, num_states = [(b"", matcher)], 0
    while todo:
        text, at = todo.pop()
        num_states += 1
        follows = {
            token
            for token, piece in enumerate(PIECES)
            if piece and token not in ENDS and any(s.startswith(text + piece) for s in language)
        }
        ends = set(ENDS) if text in language else set()
        assert set(permitted(at.mask())) == follows | ends, text
        assert at.is_finished == (not follows), text
        for token in follows:
            if PIECES.index(PIECES[token]) == token:  # of equal pieces one is enough
                after = at.copy()
                after.accept(token)
                todo.append((text + PIECES[token], after))
    return num_states


@pytest.mark.parametrize(
    ("kind", "text", "language"),
    [
        ("choice", '["a", "ab", "b\\n", "é", "\\"", "/x/"]', ["a", "ab", "b\n", "é", '"', "/x/"]),
        ("regex", "(a|ab)(c|bcd)?", ["a", "ab", "ac", "abc", "abcd", "abbcd"]),
        ("regex", "^a/b{1,2}$", ["a/b", "a/bb"]),
        ("lark", 'start: "ab" x "a"?\nx: "1" | "é"', ["ab1", "ab1a", "abé", "abéa"]),
        ("json_schema", '{"enum": ["ab", 1, true, null]}', ['"ab"', "1", "true", "null"]),
        ("json_schema", '{"const": "é"}', ['"é"']),
    ],
)  # fmt: skip
def test_masks_of_finite_languages(kind: GrammarKind, text: str, language: list[str]) -> None:
    found = expect_exact(start(kind, text, MADE), {word.encode() for word in language})
    assert found > 3


@settings(max_examples=60, deadline=None)
@given(st.sets(st.text(alphabet="abcé\n{", min_size=1, max_size=4), min_size=1, max_size=6))
def test_masks_of_any_list_of_words(words: set[str]) -> None:
    matcher = start("choice", json.dumps(sorted(words)), MADE)
    expect_exact(matcher, {word.encode() for word in words})


PATTERNS = [r"[0-9]{2}-[a-c]+", r"(true|false)( (true|false))*", r"a?b*c{2,5}", r"[^\n]{0,6}x"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_of_a_pattern_match_it(pattern: str) -> None:
    texts = {write(start("regex", pattern, MADE), seed) for seed in range(60)}
    texts.discard(None)
    assert len(texts) > 5
    assert all(text is not None and re.fullmatch(pattern, text) for text in texts)


def test_rollback_is_as_if_nothing_had_come() -> None:
    matcher, other = start("regex", "(ab|ba)+c", MADE), start("regex", "(ab|ba)+c", MADE)
    for token in b"ab":
        matcher.accept(token)
        other.accept(token)
    for tokens in (b"ba", b"c", b"abab"):
        for token in tokens:
            matcher.accept(token)
        matcher.rollback(len(tokens))
        assert matcher.mask() == other.mask() and not matcher.is_finished
    for tokens in ([ord("c"), ENDS[0]], [ord("c"), ENDS[1], ENDS[0]]):
        for token in tokens:
            matcher.accept(token)
        assert matcher.is_finished and matcher.copy().is_finished
        matcher.rollback(len(tokens) - 1)
        assert permitted(matcher.mask()) == ENDS
        matcher.rollback(1)
        assert matcher.mask() == other.mask() and not matcher.is_finished


def test_rollback_over_an_end_that_was_chosen() -> None:
    """Here more could have come."""
    matcher = start("regex", "a+", MADE)
    matcher.accept(ord("a"))
    before = matcher.mask()
    matcher.accept(ENDS[1])
    assert matcher.is_finished
    matcher.rollback(1)
    assert not matcher.is_finished and matcher.mask() == before


def test_copies_go_their_own_ways() -> None:
    first = start("choice", '["ab", "ba"]', MADE)
    second = first.copy()
    first.accept(ord("a"))
    assert permitted(first.mask()) == [ord("b")]
    assert ord("a") in permitted(second.mask()) and ord("b") in permitted(second.mask())


def test_a_model_may_know_more_or_fewer_ids_than_its_tokenizer() -> None:
    def token_bytes(token: int) -> bytes:
        return PIECES[token] if token < len(PIECES) else b""

    for size in (300, len(PIECES), 200):
        ends = [ENDS[0], 10] if size == 200 else ENDS
        table = build_table(token_bytes, lambda token: token in ENDS, size, ends)

        made = build_tokenizer(table)
        mask = start("regex", "[a-c]+", made).mask()
        known = [t for t in (97, 98, 99, 256, 257, 258, 259) if t < size]
        assert permitted(mask, size) == known
