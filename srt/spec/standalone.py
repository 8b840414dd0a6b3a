"""Guesses of a smaller model with the same vocabulary: a second runner in this process.

Its KV pool has planes of its own and shares page ids and the row table with the target's, so it is
told nothing about memory. It computes every prompt slice the target computes; a decode runs it once for
each guess: first over the tokens it has no KV of, usually the last one, then over its own guesses.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace

from srt.protocols.drafter import Guess, Outcome, Wish
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.rows import Rows


class StandaloneDrafter:
    """`runner` has the target's page table, and `sampler` is its own, with the target's vocabulary."""

    name = "standalone"
    taps: tuple[int, ...] = ()

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self.runner = runner
        self._rows = Rows(sampler)

    def open(self, setups: list[RowSetup]) -> None:
        self._rows.open(setups)

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        silent = [
            replace(piece, sample=False, prompt_logprobs=None, targets=[], allowed=None)
            for piece in slices
        ]
        self.runner.forward(self.runner.prepare(ForwardBatch(step=0, slices=silent)))
        for piece in slices:
            self._rows[piece.row].valid = piece.start + piece.length

    def propose(self, wishes: list[Wish]) -> list[Guess]:
        rows = self._rows.begin(wishes)
        for depth in range(max(wish.most for wish in wishes)):
            self._guess([self._slice(wish, depth) for wish in wishes if wish.most > depth])
        return [Guess(list(row.guess)) for row in rows]

    def absorb(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            row = self._rows[outcome.row]
            num_guesses, num_known = len(row.guess), len(row.tokens)
            num_right = self._rows.settle(outcome)
            if num_guesses:  # the last guess was never computed itself
                row.valid = num_known + min(num_right, num_guesses - 1)

    def _slice(self, wish: Wish, depth: int) -> Slice:
        row = self._rows[wish.row]
        if depth:
            start = wish.start + depth
            return Slice(row=wish.row, start=start, length=1, tokens=None, sample=True)
        tokens = row.tokens[row.valid :]
        return Slice(row=wish.row, start=row.valid, length=len(tokens), tokens=tokens, sample=True)

    def _guess(self, slices: list[Slice]) -> None:
        inputs = self.runner.prepare(ForwardBatch(step=0, slices=slices))
        rows = [piece.row for piece in slices]
        logits = self.runner.logits(self.runner.forward(inputs))
        sampled = self._rows.sampler.sample(logits, rows)
        self.runner.remember(rows, sampled.tokens)
        for row, token in zip(rows, sampled.tokens.tolist(), strict=True):
            self._rows[row].guess.append(token)
