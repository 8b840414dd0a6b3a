"""How far greedy chains get: rounds of guess and verify, walked through a text that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Acceptance:
    """`tokens` that `rounds` of verification gave, each round's own token included; `reached[j]`: rounds
    in which at least j + 1 guesses were right."""

    steps: int
    tokens: int = 0
    rounds: int = 0
    reached: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.reached = [0] * self.steps

    @property
    def mean_length(self) -> float:
        """Tokens per verification: 1 without a right guess, at most steps + 1."""
        return self.tokens / max(1, self.rounds)

    def walk(self, right: Sequence[Sequence[bool]], first: int, last: int) -> None:
        """`right[j][p]`: step j at position p names token p + 1. The token at `first` is the first that
        was written, by the prompt's forward; the token at `last` ends the text."""
        place = first
        while place < last:
            length = 0
            while length < self.steps and place + length < last and right[length][place + length]:
                self.reached[length] += 1
                length += 1
            gained = min(length + 1, last - place)
            self.tokens += gained
            self.rounds += 1
            place += gained
