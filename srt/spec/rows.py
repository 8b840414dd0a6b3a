"""What every drafter with a model keeps of its rows: their tokens, how much of the draft's KV is right,
and a sampler that draws guesses as the target will draw tokens.

    tokens        [ prompt and output, as the target has them ................. last ]
    KV is right   [ 0 ................................ valid )
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from srt.protocols.drafter import Outcome, Wish
from srt.protocols.forward_batch import RowSetup
from srt.sampling.sampler import Sampler


@dataclass(slots=True, kw_only=True)
class Row:
    tokens: list[int]
    valid: int = 0
    guess: list[int] = field(default_factory=list)  # drawn, not absorbed yet; a chain


class Rows:
    """`sampler` is the draft's own, with the target's vocabulary: it has the requests' parameters and
    seeds, and the noise the target will draw with. The closer the two models, the likelier are equal
    tokens, at any temperature."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._rows: dict[int, Row] = {}

    def __getitem__(self, row: int) -> Row:
        return self._rows[row]

    def open(self, setups: list[RowSetup]) -> None:
        self.sampler.open(setups)
        for setup in setups:
            self._rows[setup.row] = Row(tokens=list(setup.tokens))

    def begin(self, wishes: list[Wish]) -> list[Row]:
        """The rows of the wishes; what they hold ends where the wishes start."""
        rows = [self._rows[wish.row] for wish in wishes]
        for wish, row in zip(wishes, rows, strict=True):
            assert len(row.tokens) == wish.start + 1, "the drafter lost count of a row"
        return rows

    def draw(
        self, rows: list[int], logits: torch.Tensor, mass: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        """logits [len(rows), V], and the logs of their sums of exponentials. A guess for each row,
        drawn as the target will draw, and how likely the draft thinks it is."""
        sampled = self.sampler.sample(logits.clone(), rows)
        chosen = logits[range(len(rows)), sampled.tokens]
        return sampled.tokens.tolist(), (chosen - mass).exp().tolist()

    def settle(self, outcome: Outcome) -> int:
        """The row's tokens and the sampler become what the target says. Returns how many of the guesses
        were right."""
        row, tokens = self._rows[outcome.row], outcome.tokens
        guess, row.guess = row.guess, []
        num_right = shared_len(guess, tokens)
        if len(guess) > num_right:
            self.sampler.rollback(outcome.row, len(guess) - num_right)
        self.sampler.advance(outcome.row, tokens[num_right:])
        row.tokens += tokens
        return num_right


def shared_len(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
