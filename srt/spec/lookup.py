"""Two drafters in one: what stood there before is looked up first, for it costs nothing; where nothing
did, the model guesses."""

from __future__ import annotations

import torch

from srt.protocols.drafter import Drafter, Guess, Outcome, Wish
from srt.protocols.forward_batch import RowSetup, Slice
from srt.spec.ngram import NgramDrafter


class LookupFirst:
    """`model`: any drafter that may be passed over; it hears of everything, so it is ready when asked.
    Its own guesses are at most `most` tokens for a row, whatever a lookup may find."""

    def __init__(self, lookup: NgramDrafter, model: Drafter, most: int) -> None:
        self.name = model.name
        self.taps = model.taps
        self.model = model
        self._lookup = lookup
        self._most = most

    def open(self, setups: list[RowSetup]) -> None:
        self._lookup.open(setups)
        self.model.open(setups)

    def propose(self, wishes: list[Wish]) -> list[Guess]:
        found = {
            wish.row: guess
            for wish, guess in zip(wishes, self._lookup.propose(wishes), strict=True)
            if guess.tokens
        }
        rest = [
            Wish(row=wish.row, start=wish.start, most=min(wish.most, self._most))
            for wish in wishes
            if wish.row not in found
        ]
        for wish, guess in zip(rest, self.model.propose(rest) if rest else [], strict=True):
            found[wish.row] = guess
        return [found[wish.row] for wish in wishes]

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        self.model.prefill(slices, features)

    def absorb(self, outcomes: list[Outcome]) -> None:
        self._lookup.absorb(outcomes)
        self.model.absorb(outcomes)
