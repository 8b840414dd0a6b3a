"""Text made piece by piece equals text made at once, and stop strings are found wherever tokens cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_proc.incremental import Utf8Stream
from tokenizer_proc.stop_strings import StopMatcher, StopStrings


def cut(data, cuts):
    places = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in zip(places, places[1:], strict=False)]


CUTS = st.lists(st.integers(0, 10**6), max_size=12)
BYTES = st.one_of(
    st.text(max_size=40).map(str.encode),
    st.binary(max_size=40),
    st.lists(st.sampled_from([b"\xf0\x9f", b"\xa7\xad", b"a", b"\xe2", b"\x82", b"\xff"])).map(
        b"".join
    ),
)


@given(BYTES, CUTS)
def test_any_cut_of_any_bytes_gives_the_one_shot_decode(data: bytes, cuts: list[int]) -> None:
    stream = Utf8Stream()
    text = "".join(stream.push(piece) for piece in cut(data, cuts)) + stream.flush()
    assert text == data.decode("utf-8", errors="replace")
    assert stream.is_clean


def test_half_a_character_waits() -> None:
    stream = Utf8Stream()
    assert [stream.push(bytes([byte])) for byte in "\U0001f9ed".encode()] == [
        "",
        "",
        "",
        "\U0001f9ed",
    ]
    assert stream.push(b"\xf0\x9f") == "" and not stream.is_clean
    assert stream.push(b"a") == "\ufffda"  # what cannot be completed any more is told at once
    stream.push(b"\xe2\x82")
    assert stream.flush() == "\ufffd"


def naive(pieces: list[str], stops: list[str], first: int, include: bool) -> tuple[str, str | None]:
    """The definition, over the whole text: every occurrence, by the piece that completes it."""
    text, end = "".join(pieces), 0
    ends_of = []
    for number, piece in enumerate(pieces, 1):
        ends_of += [number] * len(piece)
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and ends_of[end - 1] >= first:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


LETTERS = st.text("ab\U0001f9ed", max_size=24)
STOPS = st.lists(st.text("ab\U0001f9ed", min_size=1, max_size=5), min_size=1, max_size=5)


@given(LETTERS, CUTS, STOPS, st.integers(0, 6), st.booleans())
def test_matcher_equals_the_definition(
    text: str, cuts: list[int], stops: list[str], first: int, include: bool
) -> None:
    pieces = cut(text, cuts)
    matcher = StopMatcher(StopStrings(stops), include=include)
    out = ""
    for number, piece in enumerate(pieces, 1):
        out += matcher.push(piece, number >= first)
        wanted, _ = naive(pieces, stops, first, include)
        assert wanted.startswith(out), "leaked"
        if matcher.matched is not None:
            break
        so_far = "".join(pieces[:number])
        held = so_far[len(out) :]
        longest = max(
            (n for s in stops for n in range(len(s)) if so_far.endswith(s[:n])), default=0
        )
        assert len(held) == longest, "held back neither more nor less than may become a stop"
    if matcher.matched is None:
        out += matcher.flush()
    assert (out, matcher.matched) == naive(pieces, stops, first, include)


@given(LETTERS, CUTS, CUTS, STOPS)
def test_the_cut_does_not_matter(
    text: str, one: list[int], two: list[int], stops: list[str]
) -> None:
    results = []
    for cuts in (one, two):
        matcher = StopMatcher(StopStrings(stops))
        out = ""
        for piece in cut(text, cuts):
            out += matcher.push(piece)
            if matcher.matched is not None:
                break
        results.append((out + matcher.flush(), matcher.matched))
    assert results[0] == results[1]


def test_one_stop_is_the_beginning_of_another() -> None:
    for pieces in (["go <<END>>"], ["go <", "<END>>"]):
        matcher = StopMatcher(StopStrings(["<<END>>", "<<"]))
        out = ""
        for piece in pieces:
            out += matcher.push(piece)
            if matcher.matched is not None:
                break
        assert (out, matcher.matched) == ("go ", "<<")


def test_the_longest_of_those_that_end_together() -> None:
    matcher = StopMatcher(StopStrings(["d", "bcd", "cd"]))
    assert matcher.push("abcd") == "a" and matcher.matched == "bcd"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["x", ""])


def test_work_per_character_does_not_grow_with_the_text() -> None:
    """Counts state changes, not time: a near miss over and over is the worst case."""

    class Counting(StopStrings):
        steps = 0

        def advance(self, state: int, character: str) -> int:
            self.steps += 1
            return super().advance(state, character)

    stops = Counting(["a" * 500 + "b", *(f"a{n}" for n in range(1000))])
    stops.steps = 0
    matcher = StopMatcher(stops)
    for _ in range(2000):
        matcher.push("aa")
        assert len(matcher._held) <= 500
    assert stops.steps == 4000
