"""EAGLE: guesses of a small network that reads the target's features, and its own states after them.

A proposal runs the network over the pending tokens first, then over its own guesses, whose states stand
in for features that nobody has yet. As a chain it stops early where the guess would hardly hold: a step
costs the same whether its token is right or not. As a tree it grows the likeliest branches, and the
likeliest of all tokens met are verified (arXiv 2406.16858).
"""

from __future__ import annotations

import torch

from srt.models.draft import FeatureNetwork
from srt.protocols.drafter import Guess, Outcome, Wish
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, Window
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.feed import Feed, Meal
from srt.spec.tree import Tree


class EagleDrafter:
    """`runner` holds a `FeatureNetwork` and the target's page table; `sampler` is its own, with the
    target's vocabulary. Which EAGLE it is, 1, 2 or 3, is the network's business.

    topk 1: chains of up to `steps` guesses, which end where the product of the draft's own
    probabilities falls below `confidence`. Otherwise trees of depth `steps`, of whose tokens the best
    `most` of the wish are kept; topk * (steps - 1) tokens of it are computed.
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
        self._feed = Feed(sampler)
        self._rows = self._feed.rows

    def open(self, setups: list[RowSetup]) -> None:
        self._feed.open(setups)

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        self._compute(self._feed.prefill(slices, features))

    def propose(self, wishes: list[Wish]) -> list[Guess]:
        known, meals = self._feed.ask(wishes)
        if not known:
            return [Guess([]) for _ in wishes]
        states = self._compute(meals)
        assert states is not None
        make = self._propose_chains if self._topk == 1 else self._propose_trees
        found = dict(zip((wish.row for wish in known), make(known, states), strict=True))
        return [found.get(wish.row, Guess([])) for wish in wishes]

    def absorb(self, outcomes: list[Outcome]) -> None:
        self._compute(self._feed.absorb(outcomes))

    def _compute(self, meals: list[Meal]) -> torch.Tensor | None:
        """The states of the rows' last tokens, [len(meals), H]; None if there is nothing to compute."""
        if not meals:
            return None
        slices = [
            Slice(
                row=meal.row,
                start=meal.start,
                length=len(meal.tokens),
                tokens=meal.tokens,
                sample=True,
            )
            for meal in meals
        ]
        features = torch.cat([meal.features for meal in meals])
        return self._forward(slices, self.network.fuse(features))

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
