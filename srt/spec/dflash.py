"""DFLASH: one forward of a small network guesses a whole block (arXiv 2602.06036).

The guesses of a block do not know of each other; each is the likeliest, or drawn with the request's own
noise, given the context alone.
"""

from __future__ import annotations

import torch

from srt.models.dflash import BlockNetwork
from srt.protocols.drafter import Guess, Outcome, Wish
from srt.protocols.forward_batch import RowSetup, Slice
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.block import Blocks, places


class DflashDrafter:
    """`runner` holds a `BlockNetwork` and the target's page table; `sampler` is its own."""

    name = "dflash"

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        network = runner.network
        assert isinstance(network, BlockNetwork)
        self.runner = runner
        self.network = network
        self.taps = network.taps
        self._blocks = Blocks(runner, network, sampler)

    def open(self, setups: list[RowSetup]) -> None:
        self._blocks.open(setups)

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        self._blocks.prefill(slices, features)

    def absorb(self, outcomes: list[Outcome]) -> None:
        self._blocks.absorb(outcomes)

    def propose(self, wishes: list[Wish]) -> list[Guess]:
        rows, lengths = self._blocks.begin(wishes)
        logits = self.network.logits(self._blocks.states(wishes, lengths))
        for depth in range(max(lengths)):
            going, where = places(lengths, depth)
            numbers = [wishes[index].row for index in going]
            sampled = self._blocks.rows.sampler.sample(logits[where], numbers)
            for index, token in zip(going, sampled.tokens.tolist(), strict=True):
                rows[index].guess.append(token)
        return [Guess(list(row.guess)) for row in rows]
