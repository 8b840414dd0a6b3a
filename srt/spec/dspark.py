"""DSPARK: DFLASH's block, in which each guess knows the one before it, cut where it is not confident.

The backbone's one forward gives all logits of a block; a walk through the block adds to each what the
token drawn before it says, which costs two thin matrices per guess. How much of the chains is verified
is the planner's business.
"""

from __future__ import annotations

import torch

from srt.models.dspark import DsparkNetwork
from srt.protocols.drafter import Guess, Outcome, Wish
from srt.protocols.forward_batch import RowSetup, Slice
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.block import Blocks, places
from srt.spec.planner import plan
from srt.spec.rows import Row


class DsparkDrafter:
    """`runner` holds a `DsparkNetwork` and the target's page table; `sampler` is its own. For planner,
    threshold and budget see `srt.spec.planner`."""

    name = "dspark"

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        planner: str,
        threshold: float,
        budget: int,
    ) -> None:
        network = runner.network
        assert isinstance(network, DsparkNetwork)
        assert planner == "static" or network.has_confidence, "nothing to plan with"
        self.runner = runner
        self.network = network
        self.taps = network.backbone.taps
        self._blocks = Blocks(runner, network.backbone, sampler)
        self._planner, self._threshold, self._budget = planner, threshold, budget

    def open(self, setups: list[RowSetup]) -> None:
        self._blocks.open(setups)

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        self._blocks.prefill(slices, features)

    def absorb(self, outcomes: list[Outcome]) -> None:
        self._blocks.absorb(outcomes)

    def propose(self, wishes: list[Wish]) -> list[Guess]:
        rows, lengths = self._blocks.begin(wishes)
        states = self._blocks.states(wishes, lengths)
        before = self._walk(wishes, rows, lengths, states)
        if self._planner != "static":
            self._cut(wishes, rows, self.network.confidence(before, states).tolist())
        return [Guess(list(row.guess)) for row in rows]

    def _walk(
        self, wishes: list[Wish], rows: list[Row], lengths: list[int], states: torch.Tensor
    ) -> torch.Tensor:
        """Draws all guesses. Returns the token before each, [sum(lengths)] int64."""
        logits = self.network.backbone.logits(states)
        memory = self.network.memory(len(rows))
        newest = torch.tensor([row.tokens[-1] for row in rows], device=states.device)
        before = newest.new_empty(len(states))
        for depth in range(max(lengths)):
            going, where = places(lengths, depth)
            before[where] = newest[going]
            bias, fresh = self.network.bias(newest[going], states[where], memory[going])
            numbers = [wishes[index].row for index in going]
            sampled = self._blocks.rows.sampler.sample(logits[where] + bias, numbers)
            newest[going], memory[going] = sampled.tokens, fresh
            for index, token in zip(going, sampled.tokens.tolist(), strict=True):
                rows[index].guess.append(token)
        return before

    def _cut(self, wishes: list[Wish], rows: list[Row], chances: list[float]) -> None:
        """Drops the guesses that the planner does not want; the sampler forgets them."""
        chains, first = [], 0
        for row in rows:
            chains.append(chances[first : first + len(row.guess)])
            first += len(row.guess)
        kept = plan(self._planner, chains, threshold=self._threshold, budget=self._budget)
        for wish, row, length in zip(wishes, rows, kept, strict=True):
            if length < len(row.guess):
                self._blocks.rows.sampler.rollback(wish.row, len(row.guess) - length)
                del row.guess[length:]
