"""Guesses without a model: what followed the last few tokens when they stood there before.

A row looks into its own prompt and output first (prompt lookup), then into what other requests of the
same salt have generated. The longest match of 2 to 6 tokens decides, of equal ones the latest; a short
match may guess only little, for it is often chance. Pure: no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from srt.protocols.drafter import Guess, Outcome, Wish
from srt.protocols.forward_batch import RowSetup, Slice

if TYPE_CHECKING:
    import torch

LONGEST = 6
SHORTEST = 2
TRUST = {2: 2, 3: 4}  # guesses that a match of this length may make; longer ones make any number
CORPUS_SIZES = (6, 5, 4)  # among the words of others a short match is chance
CORPUS_TOKENS = 1 << 17  # of one salt
CORPORA = 16  # salts


class History:
    """A growing sequence of tokens that knows where each of its short runs was last continued."""

    def __init__(self, sizes: Iterable[int] = range(SHORTEST, LONGEST + 1)) -> None:
        self.tokens: list[int] = []
        self._sizes = tuple(sorted(sizes, reverse=True))
        self._follows: dict[tuple[int, ...], int] = {}  # a run -> the place of what came after it
        self._num_learnt = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Where runs are continued is learnt when somebody asks: among many streams nobody does."""
        self.tokens.extend(tokens)

    def learn(self) -> None:
        """What was added since the last time; about 3 microseconds a token."""
        for end in range(self._num_learnt, len(self.tokens)):
            for size in self._sizes:
                if size <= end:
                    self._follows[tuple(self.tokens[end - size : end])] = end
        self._num_learnt = len(self.tokens)

    def find(self, context: list[int], most: int, longer_than: int = 0) -> tuple[int, list[int]]:
        """The length of the longest run at the end of `context` that is known, if it is longer than
        `longer_than`, and up to `most` tokens that followed it; else (0, [])."""
        self.learn()
        for size in self._sizes:
            if size <= longer_than:
                break
            if size > len(context):
                continue
            place = self._follows.get(tuple(context[len(context) - size :]))
            if place is not None:
                return size, self._read(place, min(most, TRUST.get(size, most)))
        return 0, []

    def _read(self, place: int, num: int) -> list[int]:
        """A run that reaches the end goes on as it began: a loop is guessed as a loop."""
        found = self.tokens[place : place + num]
        period = len(found)
        while len(found) < num:
            found.append(found[-period])
        return found


class Corpus:
    """What was generated under one salt: the latest tokens, between half of and all `num_tokens`."""

    def __init__(self, num_tokens: int) -> None:
        self._half = max(1, num_tokens // 2)
        self._young, self._old = History(CORPUS_SIZES), History(CORPUS_SIZES)

    def extend(self, tokens: list[int]) -> None:
        if len(self._young.tokens) + len(tokens) > self._half:
            self._young, self._old = History(CORPUS_SIZES), self._young
        self._young.extend(tokens)
        self._young.learn()  # a little at a time: all of it at once would hold up a step

    def find(self, context: list[int], most: int, longer_than: int) -> list[int]:
        size, found = self._young.find(context, most, longer_than)
        _, older = self._old.find(context, most, max(size, longer_than))
        return older or found


@dataclass(slots=True, kw_only=True)
class _Row:
    history: History
    salt: str
    num_given: int  # tokens that it began with; what follows them is its own output


class NgramDrafter:
    """`corpus_tokens` 0: rows look into themselves only. Matches below `shortest` count as none."""

    name = "ngram"
    taps: tuple[int, ...] = ()

    def __init__(self, corpus_tokens: int = CORPUS_TOKENS, shortest: int = SHORTEST) -> None:
        self._corpus_tokens = corpus_tokens
        self._shortest = shortest
        self._rows: dict[int, _Row] = {}
        self._corpora: OrderedDict[str, Corpus] = OrderedDict()  # by salt, latest use last

    def open(self, setups: list[RowSetup]) -> None:
        for setup in setups:
            self._share(self._rows.pop(setup.row, None))
            history = History()
            history.extend(setup.tokens)
            self._rows[setup.row] = _Row(
                history=history, salt=setup.salt, num_given=len(setup.tokens)
            )

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        """The prompt came with `open`."""

    def propose(self, wishes: list[Wish]) -> list[Guess]:
        return [Guess(self._guess(self._rows[wish.row], wish.most)) for wish in wishes]

    def absorb(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self._rows[outcome.row].history.extend(outcome.tokens)

    def _guess(self, row: _Row, most: int) -> list[int]:
        tokens = row.history.tokens
        context = tokens[-LONGEST:]
        size, guess = row.history.find(context, most, longer_than=self._shortest - 1)
        corpus = self._corpora.get(row.salt)
        if corpus is not None and size < LONGEST:
            guess = corpus.find(context, most, longer_than=size) or guess
        return guess

    def _share(self, row: _Row | None) -> None:
        """What the row generated becomes known to later rows of its salt; the salts that were not used
        for longest are forgotten."""
        if row is None or not self._corpus_tokens:
            return
        corpus = self._corpora.pop(row.salt, None) or Corpus(self._corpus_tokens)
        corpus.extend(row.history.tokens[row.num_given :])
        self._corpora[row.salt] = corpus
        if len(self._corpora) > CORPORA:
            self._corpora.popitem(last=False)
