"""The worker of a speculating engine: the drafter guesses, the target verifies, in one step."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import torch

from srt.protocols.drafter import Drafter, Outcome, Wish
from srt.protocols.forward_batch import ForwardBatch, Slice, StepResult
from srt.protocols.worker import WorkerFacts
from srt.runner.tp_worker import StepTicket, TpModelWorker


class SpeculativeWorker:
    """A `Worker` around the target's worker, on the same thread. A step without guesses is the target's
    own step."""

    def __init__(self, target: TpModelWorker, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter
        self._last: dict[int, int] = {}  # by row: the token that has no KV yet

    @property
    def facts(self) -> WorkerFacts:
        return self.target.facts

    def launch(self, batch: ForwardBatch) -> StepTicket:
        return self.target.submit(self._step, batch)

    def close(self) -> None:
        self.target.close()

    @torch.inference_mode()
    def _step(self, batch: ForwardBatch) -> StepResult:
        began = perf_counter()
        self.target.runner.write_table(batch.table_writes)
        guesses = self._guess(batch)
        drafted = perf_counter()
        order, slices = arrange(batch.slices, guesses, self._last)
        result = self.target.step(replace(batch, slices=slices, table_writes=[]))
        places = {index: place for place, index in enumerate(order)}
        result.slices = [result.slices[places[index]] for index in range(len(order))]
        verified = perf_counter()
        outcomes = []
        for piece, got in zip(batch.slices, result.slices, strict=True):
            if piece.sample:
                outcomes.append(Outcome(row=piece.row, tokens=got.tokens))
                if got.tokens:
                    self._last[piece.row] = got.tokens[-1]
        self.drafter.absorb(outcomes)
        result.draft_seconds = drafted - began + perf_counter() - verified
        return result

    def _guess(self, batch: ForwardBatch) -> dict[int, list[int]]:
        """By row; rows without a guess are left out."""
        self.drafter.open(batch.setups)
        prompts = [piece for piece in batch.slices if piece.tokens is not None]
        if prompts:
            self.drafter.prefill(prompts)
        wishes = [
            Wish(row=piece.row, start=piece.start, most=piece.draft)
            for piece in batch.slices
            if piece.draft
        ]
        found = self.drafter.propose(wishes) if wishes else []
        for wish, guess in zip(wishes, found, strict=True):
            assert len(guess) <= wish.most, (self.drafter.name, wish, guess)
        return {wish.row: guess for wish, guess in zip(wishes, found, strict=True) if guess}


def arrange(
    slices: list[Slice], guesses: dict[int, list[int]], last: dict[int, int]
) -> tuple[list[int], list[Slice]]:
    """The slices as the target computes them: plain decodes, then decodes with their guesses, then
    prompts. And for each its index in the given order."""
    plain, guessed, prompts = [], [], []
    for index, piece in enumerate(slices):
        if piece.tokens is not None:
            prompts.append((index, piece))
        elif piece.row in guesses:
            tokens = [last[piece.row], *guesses[piece.row]]
            chain = replace(piece, length=len(tokens), tokens=tokens, draft=len(tokens) - 1)
            guessed.append((index, chain))
        else:
            plain.append((index, replace(piece, draft=0) if piece.draft else piece))
    arranged = [*plain, *guessed, *prompts]
    return [index for index, _ in arranged], [piece for _, piece in arranged]
