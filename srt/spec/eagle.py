"""EAGLE: guesses of a small network that reads the target's features, and its own states after them.

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

from srt.models.draft import FeatureNetwork
from srt.protocols.drafter import Guess, Outcome, Wish
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, Window
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.rows import Rows
from srt.spec.tree import Tree

MOST_PENDING = 256  # features; what a row that is not wished for may gather
PATIENCE = 8  # steps that decode and ask for no guess, after which nothing is computed ahead


@dataclass(slots=True)
class _Mind:
    """What the target thought of a row: features that have not become KV yet, of the positions
    valid - 1 and after it. `carry` [1, F]: of the last position of the prompt's slice before.
    `is_lost`: too many came while nobody asked; the row has no guesses any more."""

    pending: list[torch.Tensor] = field(default_factory=list)
    num_pending: int = 0
    carry: torch.Tensor | None = None
    is_lost: bool = False

    def add(self, features: torch.Tensor) -> None:
        if not self.is_lost:
            self.pending.append(features)
            self.num_pending += len(features)

    def take(self, count: int) -> torch.Tensor:
        """The first `count` of them, which are pending no more."""
        found = torch.cat(self.pending)
        self.clear()
        self.add(found[count:])
        return found[:count]

    def clear(self) -> None:
        self.pending, self.num_pending = [], 0


class EagleDrafter:
    """`runner` holds a `FeatureNetwork` and the target's page table; `sampler` is its own, with the
    target's vocabulary. Which EAGLE it is, 1, 2 or 3, is the network's business.

    topk 1: chains of up to `steps` guesses, which end where the product of the draft's own
    probabilities falls below `confidence`. Otherwise trees of depth `steps`, of whose tokens the best
    `most` of the wish are kept; topk * (steps - 1) tokens of it are computed.

    When nobody has asked for a while, as among many requests, features are only kept, and of a row
    only `MOST_PENDING`: then the draft costs next to nothing. A prefix that enters the cache meanwhile
    has no keys of the draft, so guesses behind it are worse; answers are not.
    """

    name = "eagle"

    def __init__(
        self, runner: ModelRunner, sampler: Sampler, *, steps: int, topk: int, confidence: float
    ) -> None:
        network = runner.network
        assert isinstance(network, FeatureNetwork)
        self.network = network
        self.taps = network.taps
        self.runner = runner
        self._steps, self._topk, self._confidence = steps, topk, confidence
        self._vocab_size = runner.arch.vocab_size
        self._rows = Rows(sampler)
        self._minds: dict[int, _Mind] = {}
        self._num_unasked = 0  # steps with decodes since the last proposal

    def open(self, setups: list[RowSetup]) -> None:
        self._rows.open(setups)
        for setup in setups:
            self._minds[setup.row] = _Mind()

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        """Behind a cached prefix the feature before the slice is not known: zeros stand for it."""
        for piece, seen in zip(slices, features, strict=True):
            mind, row = self._minds[piece.row], self._rows[piece.row]
            if row.valid + mind.num_pending != piece.start and not mind.is_lost:
                mind.clear()
                mind.carry, row.valid = None, piece.start
            mind.add(seen.new_zeros(1, seen.shape[1]) if mind.carry is None else mind.carry)
            mind.add(seen[:-1])
            mind.carry = seen[-1:]
        self._tidy([piece.row for piece in slices], 0)

    def propose(self, wishes: list[Wish]) -> list[Guess]:
        self._num_unasked = -1
        self._rows.begin(wishes)
        known = [wish for wish in wishes if not self._minds[wish.row].is_lost]
        if not known:
            return [Guess([]) for _ in wishes]
        states = self._catch_up([wish.row for wish in known])
        make = self._propose_chains if self._topk == 1 else self._propose_trees
        found = dict(zip((wish.row for wish in known), make(known, states), strict=True))
        return [found.get(wish.row, Guess([])) for wish in wishes]

    def absorb(self, outcomes: list[Outcome]) -> None:
        decodes = False
        for outcome in outcomes:
            self._rows.settle(outcome)
            mind = self._minds[outcome.row]
            decodes = decodes or mind.carry is None
            mind.carry = None
            assert outcome.features is not None
            mind.add(outcome.features)
        self._num_unasked += decodes
        self._tidy([outcome.row for outcome in outcomes], MOST_PENDING, leave=1)

    def _tidy(self, rows: list[int], most: int, leave: int = 0) -> None:
        """No row may gather more than `most` features while guesses are asked for."""
        if self._num_unasked <= PATIENCE:
            long = [row for row in rows if self._minds[row].num_pending > most]
            if long:
                self._catch_up(long, leave)
            return
        for row in rows:
            if self._minds[row].num_pending > MOST_PENDING:
                self._minds[row].is_lost = True
                self._minds[row].clear()

    def _catch_up(self, rows: list[int], leave: int = 0) -> torch.Tensor:
        """Computes what is pending, but for the last `leave` tokens: a proposal begins with one. Returns
        the states of the last tokens computed, [len(rows), H]."""
        slices, features = [], []
        for number in rows:
            row, mind = self._rows[number], self._minds[number]
            start, length = row.valid, mind.num_pending - leave
            tokens = row.tokens[start : start + length]
            slices.append(Slice(row=number, start=start, length=length, tokens=tokens, sample=True))
            features.append(mind.take(length))
            row.valid += length
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
        return self._rows.draw(rows, full, mass)

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
