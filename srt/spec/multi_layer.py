"""MTP: the target brings a layer for each token ahead, and each layer has a runner and a KV pool.

Layer j computes a token t_q from what layer j - 1 made of the token before it; layer 0 from what the
target did. So in a step, with n the last known token's slot and g the guesses:

    layer 0   [ t_valid .. t_n           ]  with the target's features of valid - 1 .. n - 1   -> g_1
    layer 1   [ t_valid .. t_n, g_1      ]  with layer 0's states  of valid - 1 .. n           -> g_2
    layer 2   [ t_valid .. t_n, g_1, g_2 ]  with layer 1's states  of valid - 1 .. n + 1       -> g_3

The invariant: in every layer's pool, slots below `valid` hold K and V of the known tokens, made from
states of known tokens only. For `valid` grows when all layers have computed the known tokens; what they
compute of guesses lies behind it, is read in the same step at most, and is computed anew from what the
target says. What layer j is fed with for slot `valid` is kept, as `before[j]` of the row's mind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from srt.models.draft import FeatureNetwork
from srt.protocols.drafter import Guess, Outcome, Wish
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.spec.feed import Feed, Meal


@dataclass(slots=True, kw_only=True)
class _Line:
    """A row on its way through the layers. `states` are those of the tokens, or of tokens and guesses
    while it guesses."""

    row: int
    start: int
    tokens: list[int]
    states: torch.Tensor
    most: int = 0
    guess: list[int] = field(default_factory=list)
    trust: float = 1.0

    @property
    def is_guessing(self) -> bool:
        return len(self.guess) < self.most

    @property
    def computed(self) -> list[int]:
        return [*self.tokens, *self.guess] if self.is_guessing else self.tokens


class MultiLayerDrafter:
    """`runners` hold a `FeatureNetwork` each and the target's page table; layer j guesses the token
    j + 1 ahead. `sampler` is the draft's own, with the target's vocabulary. A chain ends where the
    product of the layers' own probabilities falls below `confidence`."""

    name = "multi_layer"

    def __init__(self, runners: list[ModelRunner], sampler: Sampler, *, confidence: float) -> None:
        self.runners = runners
        self._networks: list[FeatureNetwork] = []
        for runner in runners:
            network = runner.network
            assert isinstance(network, FeatureNetwork) and network.token_ids is None
            self._networks.append(network)
        self.taps = self._networks[0].taps
        self._confidence = confidence
        self._feed = Feed(sampler)
        self._rows = self._feed.rows

    def open(self, setups: list[RowSetup]) -> None:
        self._feed.open(setups)

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        self._compute(_lines(self._feed.prefill(slices, features)))

    def propose(self, wishes: list[Wish]) -> list[Guess]:
        known, meals = self._feed.ask(wishes)
        lines = _lines(meals)
        for line, wish in zip(lines, known, strict=True):
            line.most = min(wish.most, len(self.runners))
        self._compute(lines)
        for line in lines:
            self._rows[line.row].guess = line.guess
        found = {line.row: Guess(list(line.guess)) for line in lines}
        return [found.get(wish.row, Guess([])) for wish in wishes]

    def absorb(self, outcomes: list[Outcome]) -> None:
        self._compute(_lines(self._feed.absorb(outcomes)))

    def _compute(self, lines: list[_Line]) -> None:
        if not lines:
            return
        last = len(self.runners) - 1
        for depth in range(last):
            states = self._forward(depth, lines, keeps_all=True)
            pieces = torch.split(states, [len(line.computed) for line in lines])
            guessing = [place for place, line in enumerate(lines) if line.is_guessing]
            if guessing:
                tips = torch.cat([pieces[place][-1:] for place in guessing])
                self._guess(depth, [lines[place] for place in guessing], tips)
            for line, piece in zip(lines, pieces, strict=True):
                before = self._feed.minds[line.row].before
                line.states = _shift(before.get(depth + 1), piece)[: len(line.computed)]
                known = len(line.tokens)
                before[depth + 1] = piece[known - 1 : known]
        tips = self._forward(last, lines, keeps_all=False)
        guessing_last = [line for line in lines if line.is_guessing]
        if guessing_last:
            self._guess(last, guessing_last, tips)

    def _forward(self, depth: int, lines: list[_Line], *, keeps_all: bool) -> torch.Tensor:
        """Layer `depth` over all lines: the states of all tokens, or of the last one of each line that
        guesses."""
        runner = self.runners[depth]
        slices = [
            Slice(
                row=line.row,
                start=line.start,
                length=len(line.computed),
                tokens=line.computed,
                sample=line.is_guessing,
            )
            for line in lines
        ]
        inputs = runner.prepare(ForwardBatch(step=0, slices=slices))
        return self._networks[depth].forward(
            inputs.token_ids,
            torch.cat([line.states for line in lines]),
            inputs.attention,
            runner.pool,
            runner.backend,
            None if keeps_all else inputs.keep,
        )

    def _guess(self, depth: int, lines: list[_Line], tips: torch.Tensor) -> None:
        logits = self._networks[depth].logits(tips)
        tokens, chances = self._rows.draw([line.row for line in lines], logits, logits.logsumexp(1))
        for line, token, chance in zip(lines, tokens, chances, strict=True):
            line.guess.append(token)
            line.trust *= chance
            if line.trust < self._confidence:
                line.most = len(line.guess)


def _lines(meals: list[Meal]) -> list[_Line]:
    return [
        _Line(row=meal.row, start=meal.start, tokens=meal.tokens, states=meal.features)
        for meal in meals
    ]


def _shift(before: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
    """[1, H] in front of [T, H]; what is not known is zeros."""
    first = states.new_zeros(1, states.shape[1]) if before is None else before
    return torch.cat((first, states))
