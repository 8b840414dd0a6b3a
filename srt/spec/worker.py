"""The worker of a speculating engine: the drafter guesses, the target verifies, in one step."""

from __future__ import annotations

from time import perf_counter

import torch
from msgspec.structs import replace

from srt.protocols.drafter import Drafter, Guess, Outcome, Wish, tree_depths
from srt.protocols.forward_batch import ForwardBatch, Slice, StepResult, Window
from srt.protocols.worker import WorkerFacts
from srt.runner.tp_worker import StepTicket, TpModelWorker


class SpeculativeWorker:
    """A `Worker` around the target's worker, on the same thread. A step without guesses is the target's
    own step."""

    def __init__(self, target: TpModelWorker, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter
        self._last: dict[int, int] = {}  # by row: the token that has no KV yet
        target.runner.capture(drafter.taps)

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
        self.drafter.open(batch.setups)
        guesses = self._guess(batch)
        drafted = perf_counter()
        order, slices = arrange(batch.slices, guesses, self._last)
        result = self.target.step(replace(batch, slices=slices, table_writes=[]))
        verified = perf_counter()
        self._learn(slices, result)
        places = {index: place for place, index in enumerate(order)}
        result.slices = [result.slices[places[index]] for index in range(len(order))]
        result.draft_seconds = drafted - began + perf_counter() - verified
        return result

    def _guess(self, batch: ForwardBatch) -> dict[int, Guess]:
        """By row; rows without a guess are left out."""
        wishes = [
            Wish(row=piece.row, start=piece.start, most=piece.draft)
            for piece in batch.slices
            if piece.draft
        ]
        found = self.drafter.propose(wishes) if wishes else []
        for wish, guess in zip(wishes, found, strict=True):
            assert len(guess.tokens) <= wish.most, (self.drafter.name, wish, guess)
        pairs = zip(wishes, found, strict=True)
        return {wish.row: guess for wish, guess in pairs if guess.tokens}

    def _learn(self, slices: list[Slice], result: StepResult) -> None:
        """Tells the drafter what became of the step. `slices` are in the order they were computed."""
        features = self.target.runner.features
        prompts: list[Slice] = []
        seen: list[torch.Tensor] = []
        outcomes: list[Outcome] = []
        first = 0
        for piece, got in zip(slices, result.slices, strict=True):
            last = first + piece.length
            if piece.tokens is not None and not piece.draft:
                prompts.append(piece)
                if features is not None:
                    seen.append(features[first:last])
            if piece.sample:
                drew = [last - 1 - piece.draft, *(last - piece.draft + each for each in got.kept)]
                outcomes.append(
                    Outcome(
                        row=piece.row,
                        tokens=got.tokens,
                        features=None if features is None else features[drew[: len(got.tokens)]],
                    )
                )
                if got.tokens:
                    self._last[piece.row] = got.tokens[-1]
            first = last
        if prompts:
            self.drafter.prefill(prompts, seen)
        self.drafter.absorb(outcomes)


def arrange(
    slices: list[Slice], guesses: dict[int, Guess], last: dict[int, int]
) -> tuple[list[int], list[Slice]]:
    """The slices as the target computes them: plain decodes, then decodes with their guesses, then
    prompts. And for each its index in the given order."""
    plain, guessed, prompts = [], [], []
    for index, piece in enumerate(slices):
        if piece.tokens is not None:
            prompts.append((index, piece))
        elif piece.row in guesses:
            guessed.append((index, _with(piece, guesses[piece.row], last[piece.row])))
        else:
            plain.append((index, replace(piece, draft=0) if piece.draft else piece))
    arranged = [*plain, *guessed, *prompts]
    return [index for index, _ in arranged], [piece for _, piece in arranged]


def _with(piece: Slice, guess: Guess, last: int) -> Slice:
    return replace(
        piece,
        length=1 + len(guess.tokens),
        tokens=[last, *guess.tokens],
        draft=len(guess.tokens),
        parents=guess.parents,
        window=None if guess.parents is None else tree_window(piece.start, guess.parents),
    )


def tree_window(start: int, parents: list[int]) -> Window:
    """What a tree's tokens see, the first of which stands at `start`: each its ancestors and itself."""
    visible = [1]
    for index, parent in enumerate(parents):
        visible.append(visible[parent + 1] | 1 << (index + 1))
    depths = [0, *tree_depths(parents)]
    return Window(base=start, visible=visible, positions=[start + depth for depth in depths])
