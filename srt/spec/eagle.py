"""EAGLE-3: guesses of a small network that reads the target's features, and its own states after them.

    tokens        [ prompt and output ........................... last ]     last stands at `start`
    KV is right   [ 0 ............. valid )
    pending                         [ features of valid - 1 .. start - 1 ]   computed since

A proposal runs the network over the pending tokens first, then over its own guesses, whose states stand
in for features that nobody has yet. As a chain it stops early where the guess would hardly hold: a step
costs the same whether its token is right or not. As a tree it grows the likeliest branches, and the
likeliest of all tokens met are verified (arXiv 2406.16858).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from srt.models.eagle3 import Eagle3Network
from srt.protocols.drafter import Guess, Outcome, Wish
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, Window
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.rows import Rows
from srt.spec.tree import Tree

MOST_PENDING = 128  # tokens; what a row that is not wished for may gather before it is computed


@dataclass(slots=True)
class _Mind:
    """What the target thought of a row: features that have not become KV yet, of the positions
    valid - 1 and after it. `carry` [1, F]: of the last position of the prompt's slice before."""

    pending: list[torch.Tensor] = field(default_factory=list)
    carry: torch.Tensor | None = None


class EagleDrafter:
    """`runner` holds an `Eagle3Network` and the target's page table; `sampler` is its own, with the
    target's vocabulary.

    topk 1: chains of up to `steps` guesses, which end where the product of the draft's own
    probabilities falls below `confidence`. Otherwise trees of depth `steps`, of whose tokens the best
    `most` of the wish are kept; topk * (steps - 1) tokens of it are computed.
    """

    name = "eagle3"

    def __init__(
        self, runner: ModelRunner, sampler: Sampler, *, steps: int, topk: int, confidence: float
    ) -> None:
        network = runner.network
        assert isinstance(network, Eagle3Network)
        self.network = network
        self.taps = network.taps
        self.runner = runner
        self._steps, self._topk, self._confidence = steps, topk, confidence
        self._vocab_size = runner.arch.vocab_size
        self._rows = Rows(sampler)
        self._minds: dict[int, _Mind] = {}

    def open(self, setups: list[RowSetup]) -> None:
        self._rows.open(setups)
        for setup in setups:
            self._minds[setup.row] = _Mind()

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        """Behind a cached prefix the feature before the slice is not known: zeros stand for it."""
        shifted, silent = [], []
        for piece, seen in zip(slices, features, strict=True):
            mind, row = self._minds[piece.row], self._rows[piece.row]
            known = mind.carry if row.valid == piece.start else None
            before = seen.new_zeros(1, seen.shape[1]) if known is None else known
            shifted += [before, seen[:-1]]
            mind.carry, mind.pending = seen[-1:], []
            row.valid = piece.start + piece.length
            silent.append(
                Slice(
                    row=piece.row,
                    start=piece.start,
                    length=piece.length,
                    tokens=piece.tokens,
                    sample=False,
                )
            )
        self._forward(silent, self.network.fuse(torch.cat(shifted)))

    def propose(self, wishes: list[Wish]) -> list[Guess]:
        self._rows.begin(wishes)
        states = self._catch_up([wish.row for wish in wishes])
        if self._topk == 1:
            return self._propose_chains(wishes, states)
        return self._propose_trees(wishes, states)

    def absorb(self, outcomes: list[Outcome]) -> None:
        long = []
        for outcome in outcomes:
            self._rows.settle(outcome)
            assert outcome.features is not None
            mind = self._minds[outcome.row]
            mind.pending.append(outcome.features)
            if sum(len(each) for each in mind.pending) > MOST_PENDING:
                long.append(outcome.row)
        if long:
            self._catch_up(long)

    def _catch_up(self, rows: list[int]) -> torch.Tensor:
        """Computes all that is pending. Returns the states of the rows' last tokens, [len(rows), H]."""
        slices, features = [], []
        for number in rows:
            row, mind = self._rows[number], self._minds[number]
            tokens = row.tokens[row.valid :]
            slices.append(
                Slice(row=number, start=row.valid, length=len(tokens), tokens=tokens, sample=True)
            )
            features += mind.pending
            row.valid, mind.pending = len(row.tokens), []
        return self._forward(slices, self.network.fuse(torch.cat(features)))

    def _propose_chains(self, wishes: list[Wish], states: torch.Tensor) -> list[Guess]:
        going = list(range(len(wishes)))
        trust = [1.0] * len(wishes)
        depth = 0
        while going:
            logits = self.network.logits(states)
            rows = [wishes[index].row for index in going]
            tokens, chances = self._draw(logits, rows)
            depth += 1
            further = []
            for place, index in enumerate(going):
                trust[index] *= chances[place]
                self._rows[rows[place]].guess.append(tokens[place])
                if depth < min(wishes[index].most, self._steps):
                    if trust[index] >= self._confidence:
                        further.append(place)
            if further:
                slices = [
                    Slice(
                        row=rows[place],
                        start=wishes[going[place]].start + depth,
                        length=1,
                        tokens=[tokens[place]],
                        sample=True,
                    )
                    for place in further
                ]
                states = self._forward(slices, states[further])
            going = [going[place] for place in further]
        return [Guess(list(self._rows[wish.row].guess)) for wish in wishes]

    def _draw(self, logits: torch.Tensor, rows: list[int]) -> tuple[list[int], list[float]]:
        """A guess for each row, drawn as the target will draw, and how likely the draft thinks it is."""
        mass = logits.logsumexp(1)
        ids = self.network.token_ids
        full = logits
        if ids is not None:
            full = logits.new_full((len(rows), self._vocab_size), -torch.inf)
            full[:, ids] = logits
        sampled = self._rows.sampler.sample(full.clone(), rows)
        chosen = full[range(len(rows)), sampled.tokens]
        return sampled.tokens.tolist(), (chosen - mass).exp().tolist()

    def _propose_trees(self, wishes: list[Wish], states: torch.Tensor) -> list[Guess]:
        trees = [Tree(most=wish.most, topk=self._topk, steps=self._steps) for wish in wishes]
        going = [
            (index, -1) for index in range(len(trees))
        ]  # whose states these are, and of which node
        while going:
            logits = self.network.logits(states)
            paths = [(wishes[index].row, trees[index].path(node)) for index, node in going]
            for (index, node), (tokens, scores) in zip(
                going, self._branches(logits, paths), strict=True
            ):
                trees[index].add(node, tokens, scores)
            place = {whose: at for at, whose in enumerate(going)}
            slices, parents, following = [], [], []
            for index, tree in enumerate(trees):
                grown = tree.grow()
                if grown:
                    slices.append(self._branch(wishes[index], tree, grown))
                    parents += [place[index, tree.parents[node]] for node in grown]
                    following += [(index, node) for node in grown]
            if following:
                states = self._forward(slices, states[parents], keeps_all=True)
            going = following
        return [tree.best() for tree in trees]

    def _branches(
        self, logits: torch.Tensor, paths: list[tuple[int, list[int]]]
    ) -> list[tuple[list[int], list[float]]]:
        """For each path, a row and the guesses behind its last token, the `topk` likeliest tokens and
        the logs of their chances."""
        chances = logits.log_softmax(1)
        best, places = chances.topk(min(self._topk, chances.shape[1]), dim=1)
        ids = self.network.token_ids
        tokens = places if ids is None else ids[places]
        return list(zip(tokens.tolist(), best.tolist(), strict=True))

    def _branch(self, wish: Wish, tree: Tree, grown: list[int]) -> Slice:
        """The tokens to grow from, computed behind those grown from before."""
        base = wish.start + 1
        return Slice(
            row=wish.row,
            start=base + tree.num_grown - len(grown),
            length=len(grown),
            tokens=[tree.tokens[node] for node in grown],
            sample=False,
            window=Window(
                base=base,
                visible=[tree.visible(node) for node in grown],
                positions=[wish.start + tree.depths[node] for node in grown],
            ),
        )

    def _forward(
        self, slices: list[Slice], states: torch.Tensor, *, keeps_all: bool = False
    ) -> torch.Tensor:
        """The states of the last token of each sampling slice, or of all tokens."""
        inputs = self.runner.prepare(ForwardBatch(step=0, slices=slices))
        return self.network.forward(
            inputs.token_ids,
            states,
            inputs.attention,
            self.runner.pool,
            self.runner.backend,
            None if keeps_all else inputs.keep,
        )
