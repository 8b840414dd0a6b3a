"""Guesses of a smaller model with the same vocabulary: a second runner in this process.

Its KV pool has planes of its own and shares page ids and the row table with the target's, so it is
told nothing about memory. It computes every prompt slice the target computes; a decode runs it once for
each guess. Guesses are drawn by a sampler that has the request's parameters and seed, with the noise the
target will draw with: the closer the two models, the likelier are equal tokens, at any temperature.

    tokens        [ prompt and output, as the target has them ................. last ]
    KV is right   [ 0 ................................ valid )
    propose       first forward: tokens[valid:], usually the last one; then one token a guess
    absorb        valid stops at the first guess that was wrong; the sampler is put back there
"""

from __future__ import annotations

from dataclasses import dataclass, field

from srt.protocols.drafter import Outcome, Wish
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler


@dataclass(slots=True, kw_only=True)
class _Row:
    tokens: list[int]
    valid: int = 0
    guess: list[int] = field(default_factory=list)  # proposed, not absorbed yet


class StandaloneDrafter:
    """`runner` has the target's page table, and `sampler` is its own, with the target's vocabulary."""

    name = "standalone"

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self.runner = runner
        self._sampler = sampler
        self._rows: dict[int, _Row] = {}

    def open(self, setups: list[RowSetup]) -> None:
        self._sampler.open(setups)
        for setup in setups:
            self._rows[setup.row] = _Row(tokens=list(setup.tokens))

    def prefill(self, slices: list[Slice]) -> None:
        """What a slice starts behind came from the prefix cache, and so did its KV here."""
        silent = [
            Slice(
                row=piece.row,
                start=piece.start,
                length=piece.length,
                tokens=piece.tokens,
                sample=False,
            )
            for piece in slices
        ]
        self.runner.forward(self.runner.prepare(ForwardBatch(step=0, slices=silent)))
        for piece in slices:
            self._rows[piece.row].valid = piece.start + piece.length

    def propose(self, wishes: list[Wish]) -> list[list[int]]:
        for depth in range(max(wish.most for wish in wishes)):
            self._guess([self._slice(wish, depth) for wish in wishes if wish.most > depth])
        return [list(self._rows[wish.row].guess) for wish in wishes]

    def absorb(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            row, tokens = self._rows[outcome.row], outcome.tokens
            guess, row.guess = row.guess, []
            num_right = _common(guess, tokens)
            if len(guess) > num_right:
                self._sampler.rollback(outcome.row, len(guess) - num_right)
            self._sampler.advance(outcome.row, tokens[num_right:])
            if guess:  # the last guess was never computed itself
                row.valid = len(row.tokens) + min(num_right, len(guess) - 1)
            row.tokens += tokens

    def _slice(self, wish: Wish, depth: int) -> Slice:
        row = self._rows[wish.row]
        assert len(row.tokens) == wish.start + 1, "the drafter lost count of a row"
        if depth:
            start = wish.start + depth
            return Slice(row=wish.row, start=start, length=1, tokens=None, sample=True)
        tokens = row.tokens[row.valid :]
        return Slice(row=wish.row, start=row.valid, length=len(tokens), tokens=tokens, sample=True)

    def _guess(self, slices: list[Slice]) -> None:
        inputs = self.runner.prepare(ForwardBatch(step=0, slices=slices))
        rows = [piece.row for piece in slices]
        sampled = self._sampler.sample(self.runner.logits(self.runner.forward(inputs)), rows)
        self.runner.remember(rows, sampled.tokens)
        for row, token in zip(rows, sampled.tokens.tolist(), strict=True):
            self._rows[row].guess.append(token)


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
