"""What the target thought of each row, fed to a draft that computes it when guesses are asked for.

    tokens        [ prompt and output ........................... last ]     last stands at `start`
    KV is right   [ 0 ............. valid )
    pending                         [ features of valid - 1 .. start - 1 ]   computed since

Slot q of the draft's KV takes the feature of position q - 1. When nobody has asked for a while, as among
many requests, features are only kept, and of a row only `MOST_PENDING`: then the draft costs next to
nothing. A prefix that enters the cache meanwhile has no keys of the draft, so guesses behind it are
worse; answers are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from srt.protocols.drafter import Outcome, Wish
from srt.protocols.forward_batch import RowSetup, Slice
from srt.sampling.sampler import Sampler
from srt.spec.rows import Rows

MOST_PENDING = 256  # features; what a row that is not wished for may gather
PATIENCE = 8  # steps that decode and ask for no guess, after which nothing is computed ahead


@dataclass(slots=True)
class Mind:
    """Features of one row that have not become KV yet, [n, F] each. `carry` [1, F]: of the last position
    of the prompt's slice before. `before`: what else a drafter must know of slot valid - 1, by layer.
    `is_lost`: too many came while nobody asked; the row has no guesses any more."""

    pending: list[torch.Tensor] = field(default_factory=list)
    num_pending: int = 0
    carry: torch.Tensor | None = None
    before: dict[int, torch.Tensor] = field(default_factory=dict)
    is_lost: bool = False

    def add(self, features: torch.Tensor) -> None:
        if not self.is_lost:
            self.pending.append(features)
            self.num_pending += len(features)

    def take(self, count: int) -> torch.Tensor:
        """The first `count` of them, which are pending no more."""
        found = torch.cat(self.pending)
        self.clear()
        self.add(found[count:])
        return found[:count]

    def clear(self) -> None:
        self.pending, self.num_pending = [], 0


@dataclass(slots=True, kw_only=True)
class Meal:
    """What a row computes: tokens from slot `start` on, and a feature for each, [len(tokens), F]."""

    row: int
    start: int
    tokens: list[int]
    features: torch.Tensor


class Feed:
    """`sampler` is the draft's own, with the target's vocabulary."""

    def __init__(self, sampler: Sampler) -> None:
        self.rows = Rows(sampler)
        self.minds: dict[int, Mind] = {}
        self._num_unasked = 0  # steps with decodes since the last proposal

    def open(self, setups: list[RowSetup]) -> None:
        self.rows.open(setups)
        for setup in setups:
            self.minds[setup.row] = Mind()

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> list[Meal]:
        """What to compute now. Behind a cached prefix the feature before the slice is not known: zeros
        stand for it."""
        for piece, seen in zip(slices, features, strict=True):
            mind, row = self.minds[piece.row], self.rows[piece.row]
            if row.valid + mind.num_pending != piece.start and not mind.is_lost:
                mind.clear()
                mind.before.clear()
                mind.carry, row.valid = None, piece.start
            mind.add(seen.new_zeros(1, seen.shape[1]) if mind.carry is None else mind.carry)
            mind.add(seen[:-1])
            mind.carry = seen[-1:]
        return self._serve_long([piece.row for piece in slices], 0)

    def ask(self, wishes: list[Wish]) -> tuple[list[Wish], list[Meal]]:
        """The wishes of rows that are not lost, and what these compute first: all that is pending, at
        least the last token."""
        self._num_unasked = -1
        self.rows.begin(wishes)
        known = [wish for wish in wishes if not self.minds[wish.row].is_lost]
        return known, [self._serve(wish.row) for wish in known]

    def absorb(self, outcomes: list[Outcome]) -> list[Meal]:
        """What to compute now."""
        decodes = False
        for outcome in outcomes:
            self.rows.settle(outcome)
            mind = self.minds[outcome.row]
            decodes = decodes or mind.carry is None
            mind.carry = None
            assert outcome.features is not None
            mind.add(outcome.features)
        self._num_unasked += decodes
        return self._serve_long([outcome.row for outcome in outcomes], MOST_PENDING, leave=1)

    def _serve_long(self, rows: list[int], most: int, leave: int = 0) -> list[Meal]:
        """No row may gather more than `most` features while guesses are asked for."""
        if self._num_unasked <= PATIENCE:
            return [
                self._serve(number, leave)
                for number in rows
                if self.minds[number].num_pending > most
            ]
        for number in rows:
            mind = self.minds[number]
            if mind.num_pending > MOST_PENDING:
                mind.is_lost = True
                mind.clear()
        return []

    def _serve(self, number: int, leave: int = 0) -> Meal:
        """What is pending of a row, which then counts as computed, but for the last `leave` tokens: a
        proposal begins with one."""
        row, mind = self.rows[number], self.minds[number]
        start, length = row.valid, mind.num_pending - leave
        row.valid += length
        return Meal(
            row=number,
            start=start,
            tokens=row.tokens[start : start + length],
            features=mind.take(length),
        )
