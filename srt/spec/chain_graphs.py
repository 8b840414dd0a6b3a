"""Whole steps of guessing recorded once per number of rows and played back."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch

from srt.runner.page_table import Ints
from srt.runner.staging import Staging, aligned
from srt.runner.timeline import Timeline
from srt.spec.device_chain import DeviceChain

logger = logging.getLogger(__name__)


class ChainGraphs:
    """`sizes` ascending: numbers of rows that are recorded; a batch is padded to the next of them with
    the row that belongs to nobody. What is not recorded yet is computed eagerly, and so are more rows
    than the largest size has."""

    def __init__(
        self, chain: DeviceChain, timeline: Timeline, staging: Staging, sizes: tuple[int, ...]
    ) -> None:
        self._chain, self._timeline, self._staging = chain, timeline, staging
        self._sizes = sizes
        self._play: dict[int, Callable[[], None]] = {}
        self._padding = chain.target.table.padding_row
        self._most = most = self._padding  # all rows there are
        device = chain.target.device
        stride = aligned(4 * most)  # each array begins where staging puts it
        self._static = torch.zeros(3 * stride, dtype=torch.uint8, device=device)
        self._rows, self._starts, self._mosts = (
            self._static[at : at + 4 * most].view(torch.int32)
            for at in range(0, 3 * stride, stride)
        )
        self._out = torch.zeros(most, chain.width + 2, dtype=torch.int64, device=device)

    @property
    def missing(self) -> list[int]:
        """Sizes not recorded yet."""
        return [size for size in self._sizes if size not in self._play]

    def run(self, rows: Ints, starts: Ints, mosts: Ints) -> torch.Tensor:
        """[S, W + 2] int64 on the device: the tokens, how many count, and whether the row is bad. Valid
        until the next step."""
        num = len(rows)
        size = next((s for s in self._sizes[bisect_left(self._sizes, num) :]), num)
        given = np.zeros((3, self._most), dtype=np.int32)
        given[0] = self._padding
        given[:, :num] = rows, starts, mosts
        self._staging.send(list(given), self._static)
        play = self._play.get(size)
        if play is None:
            self._step(size)
        else:
            play()
        return self._out[:num]

    def record(self, size: int) -> None:
        began = perf_counter()
        self._rows[:size] = self._padding
        self._starts.zero_()
        self._mosts.zero_()
        self._play[size] = self._timeline.capture(lambda: self._step(size))
        logger.info("graph of %d guessing rows: %.3f s", size, perf_counter() - began)

    def _step(self, size: int) -> None:
        found = self._chain.step(self._rows[:size], self._starts[:size], self._mosts[:size])
        width = self._chain.width
        self._out[:size, :width] = found.tokens
        self._out[:size, width] = found.counts
        self._out[:size, width + 1] = found.is_bad
