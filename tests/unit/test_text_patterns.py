"""Stop patterns against Python's own engine, which may look at the whole text as often as it likes."""

from __future__ import annotations

import random
import re
from itertools import product

import pytest

from srt.wire.messages import TokenItem
from srt.wire.params import TextOptions
from tokenizer_proc.patterns import PatternFault
from tokenizer_proc.script_vocab import ScriptCodec
from tokenizer_proc.stop_patterns import MAX_EDGES, PatternScanner, StopPattern
from tokenizer_proc.stop_strings import StopMatcher, StopStrings
from tokenizer_proc.text_stream import TextStream


def first_match(pattern: str, text: str, least: int = 0) -> tuple[int, int] | None:
    """Earliest end behind `least`, then earliest start."""
    compiled = re.compile(pattern)
    for end in range(least + 1, len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end):
                return start, end
    return None


def run(pattern: str, text: str, cuts: list[int], include: bool = False) -> tuple[str, str | None]:
    """The text sent, and what matched; the text arrives in pieces of these lengths."""
    matcher = StopMatcher(StopStrings(()), [StopPattern(pattern)], include=include)
    sent, at = "", 0
    for cut in [*cuts, len(text)]:
        sent += matcher.push(text[at : at + cut])
        at += cut
        if matcher.matched is not None:
            return sent, matcher.matched
    return sent + matcher.flush(), None


def random_pattern(draw: random.Random, depth: int = 0) -> str:
    kinds = ["a", "b", ".", "[ab]", "[^a]", r"\d", r"\n", "[a-c0-9]", "c"]
    if depth == 3 or draw.random() < 0.35:
        return draw.choice(kinds)
    kind = draw.randrange(4)
    if kind == 0:
        return "".join(random_pattern(draw, depth + 1) for _ in range(draw.randint(2, 3)))
    if kind == 1:
        return f"({random_pattern(draw, depth + 1)}|{random_pattern(draw, depth + 1)})"
    count = draw.choice(["*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}", "*?", "+?", "{1,2}?"])
    return f"(?:{random_pattern(draw, depth + 1)}){count}"


def test_random_patterns_stop_where_python_finds_them() -> None:
    draw = random.Random(3)
    num_matched = 0
    for _ in range(1500):
        pattern = random_pattern(draw)
        text = "".join(draw.choice("abc1\n") for _ in range(draw.randint(1, 14)))
        cuts = [draw.randint(1, 4) for _ in range(5)]
        if re.fullmatch(pattern, ""):
            with pytest.raises(PatternFault, match="empty text"):
                StopPattern(pattern)
            continue
        found = first_match(pattern, text)
        num_matched += found is not None
        for include in (False, True):
            sent, matched = run(pattern, text, cuts, include)
            if found is None:
                assert (sent, matched) == (text, None), (pattern, text)
            else:
                assert (sent, matched) == (text[: found[include]], pattern), (pattern, text)
    assert num_matched > 300


def test_held_is_exactly_what_may_become_a_match() -> None:
    """Against trying all continuations of the lengths that these patterns need."""
    endings = ["".join(word) for size in range(5) for word in product("ab", repeat=size)]
    draw = random.Random(5)
    for pattern in ("aab", "a+b", "(ab|ba)b", "a.b", "b{2,3}a", "(a|ab)(b|ba)a?", "ab*ba"):
        compiled = re.compile(pattern)
        for _ in range(40):
            scanner = PatternScanner(StopPattern(pattern))
            text = ""
            for _ in range(8):
                text += draw.choice("ab")
                scanner.advance(text[-1])
                may_grow = [
                    size
                    for size in range(1, len(text) + 1)
                    if any(compiled.fullmatch(text[-size:] + more) for more in endings[1:])
                ]
                assert scanner.num_held == max(may_grow, default=0), (pattern, text)


def test_a_match_that_may_not_stop_yet_is_text() -> None:
    matcher = StopMatcher(StopStrings(()), [StopPattern("a+b?")])
    assert matcher.push("xa", may_stop=False) == "x"
    assert matcher.push("c", may_stop=False) == "ac"
    assert matcher.push("ya", may_stop=True) == "y" and matcher.matched == "a+b?"


def test_strings_and_patterns_together() -> None:
    """The first to complete wins; of those that end at one character the longest; of equal ones the
    string."""
    patterns = [StopPattern("[0-9]+;"), StopPattern("x;")]
    for text, sent, matched in (
        ("ab12;c", "ab", "[0-9]+;"),
        ("ab1END2;", "ab1", "END"),
        ("abx;", "ab", "x;"),
        ("ab7x;", "ab7", "x;"),
        ("EN9;", "EN", "[0-9]+;"),
        ("END", "", "END"),
    ):
        for size in (1, 2, 99):
            matcher = StopMatcher(StopStrings(["END", "x;"]), patterns)
            out, at = "", 0
            while matcher.matched is None:
                out += matcher.push(text[at : at + size])
                at += size
            assert (out, matcher.matched) == (sent, matched)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("^a", "names a place"), ("a$", "names a place"), (r"\ba", "not served"),
        (r"(a)\1", "not served"), ("(?=a)b", "only"), ("(?<n>a)", "only"), ("(?i)a", "only"),
        ("(a", "not closed"), ("a)", "too many"), ("[a", "too early"), ("a\\", "too early"),
        ("*a", "nothing before"), ("{2}", "nothing before"), ("a**", "after a quantifier"),
        ("a{3,1}", "in order"), ("a{257}", "256"), ("a{99999999}b", ""), ("[b-a]", "in order"),
        (r"\x4", "hexadecimal"), (r"\U00110000", "no such"), (r"\p{L}", "not served"),
        ("[[:alpha:]]", "class"), ("a{,3}", "{0,n}"), ("a*", "empty"), ("a|", "empty"),
        ("(a?){3}", "empty"), ("(" * 60 + "a" + ")" * 60, "groups in groups"),
        ("(.{200}){200}", "512"), ("((a|b|c|d){9}?){60}", "512"), ("(a?b?c?d?){120}e", "connections"),
        ("((((){200}){200}){200}){200}a", "too large"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(pattern: str, words: str) -> None:
    if pattern.startswith("a{9999"):  # too many digits for a count: then it is text
        assert run(pattern, "xa{99999999}b", [])[0] == "x"
        return
    with pytest.raises(PatternFault, match=re.escape(words)):
        StopPattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "text", "sent"),
    [
        (r"\{\}\.", "a{}.", "a"),
        (r"\x41\u00e9\U0001F600", "-Aé\U0001f600-", "-"),
        (r"[\]\-x]{2}", "a]-b", "a"),
        ("[]a]b", "x]b", "x"),
        (r"[^\s\d]\t", "1 \ta\t", "1 \t"),
        (r"\W\D\S", "ab !x?", "ab"),
        ("a{x", "ba{x", "b"),
        (r"\n\n+", "one\ntwo\n\nthree", "one\ntwo"),
        (r"(Observation|Action):", "do\nAction: x", "do\n"),
        ("日本?語", "これは日語", "これは"),
    ],
)
def test_syntax(pattern: str, text: str, sent: str) -> None:
    assert run(pattern, text, [1] * len(text)) == (sent, pattern)


@pytest.mark.parametrize("pattern", ["(a|aa)+b", "(a*)*b", "(a|a?)+b", "(x+x+)+y", "(.*a){20}b"])
def test_hostile_patterns_cost_their_edges_only(pattern: str) -> None:
    """What takes a backtracking engine for ever: every character is looked at once."""
    compiled = StopPattern(pattern)
    assert sum(map(len, compiled.follow)) <= MAX_EDGES
    scanner = PatternScanner(compiled)
    assert not any(scanner.advance(character) for character in "ax" * 3000)


def test_the_detokenizer_ends_a_sample_at_a_pattern() -> None:
    codec = ScriptCodec([b"<eos>", b"ab", b"c1", b"2;", b"zz"], [256], None)
    stream = TextStream(TextOptions(), codec, None, patterns=[StopPattern("[0-9]+;")])
    items = [stream.take(TokenItem(uid=1, tokens=[token])) for token in (257, 258)]
    assert [item.text for item in items if item] == ["ab", "c"]
    last = stream.take(TokenItem(uid=1, tokens=[259, 260]))
    assert last is not None and last.finish is not None and last.stopped
    assert (last.text, last.tokens, last.finish.matched) == ("", [259], "[0-9]+;")
    assert last.finish.reason == "stop" and last.finish.usage.completion_tokens == 3
