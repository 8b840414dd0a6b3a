"""A drafter guesses the next tokens of running rows. A way of speculating is one file with one of these.

The worker calls it on its own thread, in this order in every step:

    open      rows change hands
    propose   guesses for the decode slices that may have some
              (here the target computes the step)
    prefill   the prompt slices that the target has computed
    absorb    what the target made of the guesses: the only truth about what a row now holds

What a drafter guesses changes how fast an answer comes, and never the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from srt.protocols.forward_batch import RowSetup, Slice

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Up to `most` guesses behind the row's last token, which stands at position `start`. KV slots for
    positions up to start + most are the row's."""

    row: int
    start: int
    most: int


@dataclass(frozen=True, slots=True)
class Guess:
    """What was guessed for one row. `parents`: for each token the index of the one before it, -1: the
    row's last known token; None: a chain. A parent comes before its children."""

    tokens: list[int]
    parents: list[int] | None = None

    def followers(self, place: int) -> dict[int, int]:
        """By token the index of the guess for what follows guess `place`; -1: the last known token."""
        if self.parents is None:
            following = place + 1
            return {self.tokens[following]: following} if following < len(self.tokens) else {}
        # of two equal guesses the first counts
        pairs = zip(reversed(self.tokens), reversed(range(len(self.tokens))), strict=True)
        return {token: index for token, index in pairs if self.parents[index] == place}


def tree_depths(parents: list[int]) -> list[int]:
    """How far behind the last known token each guess stands: 1 for those without a parent."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def tree_depth(parents: list[int]) -> int:
    """How many guesses of the tree could be right together."""
    return max(tree_depths(parents), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The tokens a row really got in this step. Whatever was guessed for it beyond these is void.

    `features` [len(tokens), F]: those of the positions that drew them, which are the last known token
    before the step and the guesses that were right; None if the drafter taps no layers.
    """

    row: int
    tokens: list[int]
    features: torch.Tensor | None = None


class Drafter(Protocol):
    """`taps`: the target's layers whose features it wants, see `srt.models.blocks.Taps`; () for none.
    F = len(taps) * H, side by side."""

    name: str
    taps: tuple[int, ...]

    def open(self, setups: list[RowSetup]) -> None:
        """Forget what the rows were; `tokens` of a setup is all that they hold now."""
        ...

    def propose(self, wishes: list[Wish]) -> list[Guess]:
        """For each wish 0 to `most` tokens; all rows differ."""
        ...

    def prefill(self, slices: list[Slice], features: list[torch.Tensor]) -> None:
        """`features` [length, F] of each slice; empty if there are no taps. What a slice starts behind
        came from an earlier slice or from the prefix cache."""
        ...

    def absorb(self, outcomes: list[Outcome]) -> None:
        """One outcome for every row that drew a token, wished for or not. Rolls back what was assumed
        when proposing, down to the last token that was right."""
        ...
