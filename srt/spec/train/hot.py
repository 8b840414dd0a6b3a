"""The hot tokens: the part of the target's vocabulary that a draft can guess."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROUND = 256  # a draft vocabulary is a multiple of this, unless it is the whole vocabulary


@dataclass(frozen=True, slots=True)
class HotMap:
    """`tokens`: target ids in rising order; draft id i stands for tokens[i]. `coverage`: the share of
    the counted tokens that is among them."""

    tokens: list[int]
    coverage: float

    @property
    def offsets(self) -> list[int]:
        """What an EAGLE-3 checkpoint calls d2t: target id = i + offsets[i]."""
        return [token - i for i, token in enumerate(self.tokens)]


def choose_hot(
    counts: Sequence[int], *, coverage: float, most: int, always: Iterable[int] = ()
) -> HotMap:
    """The fewest tokens, in steps of `ROUND`, that cover `coverage` of `counts` (by target id), but no
    more than `most`; those of `always` are in whatever their count."""
    must = set(always)
    order = sorted(range(len(counts)), key=lambda token: (token not in must, -counts[token], token))
    total = max(1, sum(counts))
    size, covered = 0, 0
    limit = min(most, len(counts))
    while size < limit and (size == 0 or covered < coverage * total):
        step = order[size : min(size + ROUND, limit)]
        covered += sum(counts[token] for token in step)
        size += len(step)
    return HotMap(sorted(order[:size]), covered / total)
