"""A drafter guesses the next tokens of running rows. A way of speculating is one file with one of these.

The worker calls it on its own thread, in this order in every step:

    open      rows change hands
    prefill   prompt slices, as the target is about to compute them
    propose   guesses for the decode slices that may have some
    absorb    what the target made of it: the only truth about what a row now holds

What a drafter guesses changes how fast an answer comes, and never the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from srt.protocols.forward_batch import RowSetup, Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Up to `most` guesses behind the row's last token, which stands at position `start`. KV slots for
    positions up to start + most are the row's."""

    row: int
    start: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The tokens a row really got in this step. Whatever was guessed for it beyond these is void."""

    row: int
    tokens: list[int]


class Drafter(Protocol):
    name: str

    def open(self, setups: list[RowSetup]) -> None:
        """Forget what the rows were; `tokens` of a setup is all that they hold now."""
        ...

    def prefill(self, slices: list[Slice]) -> None: ...

    def propose(self, wishes: list[Wish]) -> list[list[int]]:
        """For each wish 0 to `most` token ids; all rows differ."""
        ...

    def absorb(self, outcomes: list[Outcome]) -> None:
        """One outcome for every row that drew a token, wished for or not. Rolls back what was assumed
        when proposing, down to the last token that was right."""
        ...
