"""Guesses from what stood there before."""

from __future__ import annotations

import random

import pytest

from srt.protocols.drafter import Outcome, Wish
from srt.protocols.forward_batch import RowSetup
from srt.spec.ngram import Corpus, History, NgramDrafter
from srt.wire.params import SamplingParams


def setup(row: int, tokens: list[int], salt: str = "") -> RowSetup:
    return RowSetup(
        row=row,
        params=SamplingParams(),
        tokens=tokens,
        prompt_len=len(tokens),
        stop_ids=[],
        salt=salt,
    )


def guess(drafter: NgramDrafter, row: int, most: int = 8) -> list[int]:
    [found] = drafter.propose([Wish(row=row, start=0, most=most)])
    assert found.parents is None
    return found.tokens


def opened(tokens: list[int], **more: int) -> NgramDrafter:
    drafter = NgramDrafter(**more)
    drafter.open([setup(0, tokens)])
    return drafter


def test_what_followed_is_guessed() -> None:
    drafter = opened([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 50, 1, 2, 3, 4])
    assert guess(drafter, 0, 3) == [5, 6, 7]
    assert guess(drafter, 0) == [5, 6, 7, 8, 9, 10, 50, 1]


def test_nothing_known_nothing_guessed() -> None:
    assert guess(opened([1, 2, 3, 4, 5]), 0) == []
    assert guess(opened([1]), 0) == []
    assert guess(opened([9, 1, 8, 1]), 0) == []  # one token alone is chance


def test_the_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    assert guess(opened([1, 2, 3, 40, 9, 2, 3, 50, 9, 1, 2, 3]), 0, 1) == [40]
    assert guess(opened([2, 3, 40, 9, 2, 3, 50, 9, 2, 3]), 0, 1) == [50]


def test_a_short_match_guesses_little() -> None:
    assert len(guess(opened([9, 2, 3, 4, 5, 6, 7, 8, 2, 3]), 0)) == 2
    assert len(guess(opened([9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]), 0)) == 4


def test_a_loop_is_guessed_as_a_loop() -> None:
    assert guess(opened([1, 2, 3, 1, 2, 3, 1, 2, 3]), 0, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_what_is_absorbed_is_known() -> None:
    drafter = opened([1, 2, 3, 4, 5, 6])
    drafter.absorb([Outcome(row=0, tokens=[70, 1, 2, 3])])
    assert guess(drafter, 0, 4) == [4, 5, 6, 70]


def test_others_words_are_used_within_their_salt_only() -> None:
    drafter = opened([1, 2])
    drafter.absorb([Outcome(row=0, tokens=[11, 12, 13, 14, 15, 16, 17])])
    drafter.open([setup(0, [5]), setup(1, [40, 11, 12, 13, 14]), setup(2, [11, 12, 13, 14], "b")])
    assert guess(drafter, 1, 3) == [15, 16, 17]
    assert guess(drafter, 2, 3) == []


def test_prompts_are_nobody_elses() -> None:
    drafter = opened([11, 12, 13, 14, 15, 16])
    drafter.open([setup(0, [11, 12, 13, 14])])
    assert guess(drafter, 0) == []


def test_without_a_corpus_rows_know_themselves_only() -> None:
    drafter = opened([1], corpus_tokens=0)
    drafter.absorb([Outcome(row=0, tokens=[11, 12, 13, 14, 15])])
    drafter.open([setup(0, [11, 12, 13, 14])])
    assert guess(drafter, 0) == []


@pytest.mark.parametrize("num_tokens", (64, 1000))
def test_a_corpus_forgets_the_oldest_and_stays_small(num_tokens: int) -> None:
    corpus = Corpus(num_tokens)
    for start in range(0, 4000, 10):
        corpus.extend(list(range(start, start + 10)))
    assert corpus.find([3992, 3993, 3994, 3995], 2, 0) == [3996, 3997]
    assert corpus.find([2, 3, 4, 5], 2, 0) == []
    assert len(corpus._young.tokens) + len(corpus._old.tokens) <= num_tokens + 10


def test_find_agrees_with_a_plain_search() -> None:
    random.seed(3)
    for _ in range(300):
        tokens = [random.randrange(4) for _ in range(random.randrange(1, 40))]
        history = History((3, 2))
        history.extend(tokens)
        size, found = history.find(tokens, 2)
        expected: tuple[int, int | None] = (0, None)
        for length in (3, 2):
            ends = [
                i
                for i in range(length, len(tokens))
                if tokens[i - length : i] == tokens[len(tokens) - length :]
            ]
            if ends and len(tokens) >= length:
                expected = (length, tokens[ends[-1]])
                break
        assert (size, found[0] if found else None) == expected
