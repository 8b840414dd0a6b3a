"""How a rank leaves the group of GPUs it belongs to."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from srt.parallel.collective import Ranks


class Library:
    """Of torch's process group what leaving takes; anything else would wait for the others."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def abort(self) -> None:
        self.said.append("abort")


def test_a_rank_leaves_once_and_waits_for_nobody() -> None:
    library = Library()
    ranks = Ranks(cast(dist.ProcessGroup, library), torch.device("cuda", 0))
    ranks.close()
    ranks.close()
    assert library.said == ["abort"]
