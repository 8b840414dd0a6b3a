from __future__ import annotations

import pytest
import torch

from kernels.best_token import best_token

ALL = ["reference", "torch", "native"]


@pytest.mark.parametrize("implementation", ["torch", "native"])
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (3, 15), (2, 64), (5, 97), (4, 130), (32, 49152), (0, 70)]
)
def test_values_and_places_are_those_of_the_reference(implementation, rows, size, library_for):
    """Many equal values among them: the lowest place counts."""
    torch.manual_seed(rows + size)
    for logits in (torch.randn(rows, size), torch.randint(0, 3, (rows, size)).float()):
        found = best_token(
            logits, implementation=implementation, library=library_for(implementation)
        )
        values, tokens = best_token(logits, implementation="reference")
        assert torch.equal(found[0], values) and torch.equal(found[1], tokens)


@pytest.mark.parametrize("implementation", ALL)
def test_each_place_can_win(implementation, library_for):
    logits = torch.full((150, 150), -torch.inf)
    logits.fill_diagonal_(-3e38)
    values, tokens = best_token(
        logits, implementation=implementation, library=library_for(implementation)
    )
    assert tokens.tolist() == list(range(150)) and bool((values == -3e38).all())


@pytest.mark.parametrize("implementation", ALL)
def test_odd_values(implementation, library_for):
    logits = torch.zeros(5, 200)
    logits[0, 190] = torch.nan
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 77] = torch.inf
    values, tokens = best_token(
        logits, implementation=implementation, library=library_for(implementation)
    )
    assert values[:2].isnan().all() and values[2:].tolist() == [-torch.inf, torch.inf, 0.0]
    assert int(tokens[3]) == 77 and int(tokens[4]) == 0


def test_rows_of_a_wider_tensor(library_for):
    wide = torch.randn(6, 300)
    part = wide[:, 10:250]
    found = best_token(part, implementation="native", library=library_for("native"))
    assert torch.equal(found[1], part.argmax(1))


def test_what_it_cannot_read_is_refused(library_for):
    with pytest.raises(ValueError, match="at least one column"):
        best_token(torch.zeros(2, 0))
    with pytest.raises(ValueError, match="float32"):
        best_token(
            torch.zeros(2, 8).bfloat16(), implementation="native", library=library_for("native")
        )
