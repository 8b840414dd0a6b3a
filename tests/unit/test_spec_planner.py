"""How much of each chain is verified."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, product
from operator import mul
from random import Random

import pytest

from srt.spec.planner import plan

CHAINS = [[0.9, 0.8, 0.5, 0.1], [0.2, 0.9], [1.0, 1.0, 1.0]]


def test_static_keeps_all() -> None:
    assert plan("static", CHAINS, threshold=0.9, budget=1) == [4, 2, 3]


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [(0.0, [4, 2, 3]), (0.3, [3, 0, 3]), (0.19, [3, 1, 3]), (0.75, [1, 0, 3]), (1.1, [0, 0, 0])],
)
def test_capped_cuts_where_the_product_falls_below(threshold: float, kept: list[int]) -> None:
    assert plan("capped", CHAINS, threshold=threshold, budget=1) == kept


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (0, [4, 2, 3]),
        (9, [4, 2, 3]),
        (3, [0, 0, 3]),
        (4, [1, 0, 3]),
        (6, [3, 0, 3]),
        (7, [3, 1, 3]),
        (8, [3, 2, 3]),
    ],
)
def test_ragged_shares_one_budget_by_worth(budget: int, kept: list[int]) -> None:
    """Worths: 0.9, 0.72, 0.36, 0.036; 0.2, 0.18; 1, 1, 1."""
    assert plan("ragged", CHAINS, threshold=0.0, budget=budget) == kept


def test_ragged_leaves_out_what_capped_would() -> None:
    assert plan("ragged", CHAINS, threshold=0.3, budget=9) == [3, 0, 3]
    assert plan("ragged", CHAINS, threshold=0.3, budget=5) == [2, 0, 3]


def test_equal_guesses_go_to_the_beginnings_of_chains() -> None:
    assert plan("ragged", [[1.0] * 4, [1.0] * 4], threshold=0.0, budget=5) == [3, 2]
    assert plan("ragged", [], threshold=0.0, budget=5) == []
    assert plan("capped", [[], [0.5]], threshold=0.1, budget=0) == [0, 1]


def value(chains: list[list[float]], lengths: Iterable[int]) -> float:
    """How many guesses will be right, on average."""
    cut = (chain[:length] for chain, length in zip(chains, lengths, strict=True))
    return sum(sum(accumulate(chain, mul)) for chain in cut)


def test_ragged_is_the_best_of_all_ways_to_share() -> None:
    """Against every choice of lengths within the budget."""
    random = Random(5)
    for _ in range(60):
        chains = [[random.random() for _ in range(random.randint(0, 3))] for _ in range(3)]
        budget = random.randint(1, 8)
        found = plan("ragged", chains, threshold=0.0, budget=budget)

        ways = product(*(range(len(chain) + 1) for chain in chains))
        best = max(value(chains, way) for way in ways if sum(way) <= budget)
        assert sum(found) <= budget
        assert value(chains, found) == pytest.approx(best)
