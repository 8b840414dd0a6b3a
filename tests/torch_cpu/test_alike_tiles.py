"""Tiles made on the device are those made on the host, but for their order."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention.tiles import cut_tiles
from srt.attention.triton import cut_alike


@pytest.mark.parametrize("length", [1, 3, 4, 8])
@pytest.mark.parametrize("per_tile", [1, 4, 8])
def test_alike_slices_are_cut_alike(length: int, per_tile: int) -> None:
    pytest.importorskip("triton", reason="the backend's kernels need it")
    rows, starts = [4, 0, 2], [17, 5, 90]
    wanted = cut_tiles(rows, starts, [length] * 3, [], per_tile=per_tile)
    found = cut_alike(
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        length,
        per_tile,
    )
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, wanted.tolist()))
