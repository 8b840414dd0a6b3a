"""What the ways of guessing a block at once have in common: rows, their context, a forward of blocks.

    tokens        [ prompt and output ........................... last ]    last stands at `start`
    KV            [ context: features of 0 .. start - 1 ][ last mask mask ... ]
                                                          the block, overwritten by the next

Features become context in the step that computed them: when a row's pages get into the prefix cache,
the draft's part of them is there.
"""

from __future__ import annotations

import torch

from srt.models.dflash import BlockNetwork
from srt.protocols.drafter import Outcome, Wish
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, Window
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.rows import Row, Rows


class Blocks:
    """`runner` has the network's KV pool and the target's page table; `sampler` is the draft's own, with
    the target's vocabulary."""

    def __init__(self, runner: ModelRunner, network: BlockNetwork, sampler: Sampler) -> None:
        self.network = network
        self.rows = Rows(sampler)
        self._runner = runner

    def open(self, setups: list[RowSetup]) -> None:
        self.rows.open(setups)

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        for piece in slices:
            self.rows[piece.row].valid = piece.start + piece.length
        self._inject(slices, features)

    def absorb(self, outcomes: list[Outcome]) -> None:
        """The last position of a prompt is context already. A row may begin with a decode, behind
        pages that others filled."""
        slices, features = [], []
        for outcome in outcomes:
            assert outcome.features is not None
            row = self.rows[outcome.row]
            start = len(row.tokens) - 1
            row.valid = max(row.valid, start)
            self.rows.settle(outcome)
            fresh = outcome.features[row.valid - start :]
            if len(fresh):
                slices.append(_stretch(outcome.row, row.valid, len(fresh)))
                features.append(fresh)
                row.valid += len(fresh)
        if slices:
            self._inject(slices, features)

    def begin(self, wishes: list[Wish]) -> tuple[list[Row], list[int]]:
        """The rows of the wishes, and how many guesses each will get."""
        most = self.network.shape.num_guesses
        return self.rows.begin(wishes), [min(wish.most, most) for wish in wishes]

    def states(self, wishes: list[Wish], lengths: list[int]) -> torch.Tensor:
        """[sum(lengths), H]: for each guess the state that tells it, wish by wish."""
        slices = [self._block(wish, length) for wish, length in zip(wishes, lengths, strict=True)]
        inputs = self._runner.prepare(ForwardBatch(step=0, slices=slices))
        return self.network.forward(
            inputs.token_ids,
            inputs.attention,
            self._runner.pool,
            self._runner.backend,
            inputs.keep,
        )

    def _block(self, wish: Wish, length: int) -> Slice:
        shape = self.network.shape
        size = length if shape.from_anchor else length + 1
        last = self.rows[wish.row].tokens[-1]
        window = None
        if not shape.is_causal:
            positions = list(range(wish.start, wish.start + size))
            window = Window(base=wish.start, visible=[(1 << size) - 1] * size, positions=positions)
        return Slice(
            row=wish.row,
            start=wish.start,
            length=size,
            tokens=[last, *[shape.mask_token] * (size - 1)],
            sample=True,
            draft=length - 1,
            window=window,
        )

    def _inject(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        positions, slots = self._runner.locate(slices)
        self.network.inject(torch.cat(features), positions, slots, self._runner.pool)


def _stretch(row: int, start: int, length: int) -> Slice:
    return Slice(row=row, start=start, length=length, tokens=None, sample=False)


def places(lengths: list[int], depth: int) -> tuple[list[int], list[int]]:
    """Which chains are longer than `depth`, and where their guess of that depth stands when all chains
    are laid one behind the other."""
    going, found, first = [], [], 0
    for index, length in enumerate(lengths):
        if length > depth:
            going.append(index)
            found.append(first + depth)
        first += length
    return going, found
