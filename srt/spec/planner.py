"""How many guesses of each chain are worth verifying, by how likely they are. Pure.

A guess counts only if all before it in its chain are right, so its worth is the product of the chances
up to its own, and falls along the chain.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul


def plan(planner: str, chances: list[list[float]], *, threshold: float, budget: int) -> list[int]:
    """How much to keep of each chain. `chances`: of each guess that it is right if those before it are.

    static: all of it. capped: as far as the worth is `threshold` at least. ragged: of what capped would
    keep, the `budget` worthiest guesses of all chains together; 0: as many as there are.
    """
    if planner == "static":
        return [len(chain) for chain in chances]
    worths = [list(accumulate(chain, mul)) for chain in chances]
    kept = [_worthy(worth, threshold) for worth in worths]
    if planner == "capped" or not budget or sum(kept) <= budget:
        return kept
    return _share([worth[:length] for worth, length in zip(worths, kept, strict=True)], budget)


def _worthy(worth: list[float], threshold: float) -> int:
    for place, value in enumerate(worth):
        if value < threshold:
            return place
    return len(worth)


def _share(worths: list[list[float]], budget: int) -> list[int]:
    """Of equal guesses the one nearer to its chain's start goes first, so that what is taken of a chain
    is its beginning; then the one of the earlier chain."""
    ranked = sorted(
        (-value, depth, chain)
        for chain, worth in enumerate(worths)
        for depth, value in enumerate(worth)
    )
    lengths = [0] * len(worths)
    for _, _, chain in ranked[:budget]:
        lengths[chain] += 1
    return lengths
