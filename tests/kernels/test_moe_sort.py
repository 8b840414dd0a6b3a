"""The entries of every expert side by side, against a stable sort."""

from __future__ import annotations

import pytest
import torch

from tests.triton_loops import mend_loop_bounds


@pytest.fixture
def device(device_for, library_for, monkeypatch) -> str:
    library_for("triton")
    mend_loop_bounds(monkeypatch)
    return device_for("triton")


def check(experts, tile, first, count):
    from kernels.moe.order import Sorter

    order, blocks = Sorter()(experts, tile, first, count)
    flat = experts.flatten() - first
    is_here = (flat >= 0) & (flat < count)
    wanted = torch.where(is_here, flat, count).argsort(stable=True)[: int(is_here.sum())]
    assert torch.equal(order[: len(wanted)].long(), wanted)
    found = [block[:3] for block in blocks.tolist()]
    expected = []
    place = 0
    for expert, number in enumerate(flat[is_here].bincount(minlength=count).tolist()):
        end = place + number
        expected += [[expert, at, min(at + tile, end)] for at in range(place, end, tile)]
        place = end
    assert found[: len(expected)] == expected
    assert len(found) == experts.numel() // tile + count
    assert all(block[0] == -1 for block in found[len(expected) :])


@pytest.mark.parametrize("tokens", [1, 33, 341, 342, 800, 3001, 11003])
@pytest.mark.parametrize(("first", "count"), [(0, 13), (5, 6)])
def test_sorts_as_a_stable_sort_does(tokens, first, count, device):
    """Across the limits between the kernels; of a rank's own experts only, too."""
    torch.manual_seed(tokens)
    experts = torch.randint(13, (tokens, 6), device=device, dtype=torch.int32)
    experts[experts == 7] = 2  # one that nobody wants, and a favourite
    check(experts, 64, first, count)


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize(("tokens", "count", "top"), [(5000, 128, 4), (8300, 2, 8), (450, 300, 8)])
def test_sorts_among_any_number_of_experts(tokens, count, top, tile, device):
    torch.manual_seed(count)
    experts = (torch.rand(tokens, top, device=device) ** 3 * count).int()
    check(experts, tile, 0, count)


@pytest.mark.parametrize("tokens", [90, 3000])
def test_all_want_one_expert_or_none_that_is_here(tokens, device):
    experts = torch.full((tokens, 1), 3, device=device, dtype=torch.int32)
    check(experts, 32, 0, 4)
    check(experts, 32, 0, 3)
