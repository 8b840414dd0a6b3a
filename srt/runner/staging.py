"""A step's plain numbers on their way to the device: gathered on the host, sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from srt.runner.timeline import Mark

ALIGN = 16  # bytes; every array starts where vector loads may read it
BLOCKS = 4  # more than steps are ever in flight, so a block is free when its turn comes

Array = np.ndarray[tuple[int], np.dtype[np.int32]] | np.ndarray[tuple[int], np.dtype[np.int64]]


class Staging:
    """A ring of host blocks, pinned where the device reads them by itself. A block is written again only
    when the mark behind its last use is reached."""

    def __init__(self, device: torch.device, num_bytes: int = 1 << 20) -> None:
        self._device = device
        self._blocks = [self._block(num_bytes) for _ in range(BLOCKS)]
        self._marks: list[Mark | None] = [None] * BLOCKS
        self._next = 0
        self._sent: list[int] = []  # blocks without a mark yet

    def send(self, arrays: Sequence[Array], into: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The arrays on the device, as views of one tensor: `into` [bytes] uint8 if it is given, else a
        new one. Follow with `used`, once all that reads the block is launched."""
        ends, end = [], 0
        for array in arrays:
            end = aligned(end) + array.nbytes
            ends.append(end)
        block = self._take(end)
        view = block.numpy()
        for array, stop in zip(arrays, ends, strict=True):
            view[stop - array.nbytes : stop] = array.view(np.uint8)
        if into is None:
            into = torch.empty(end, dtype=torch.uint8, device=self._device)
        into[:end].copy_(block[:end], non_blocking=True)
        return [
            into[stop - array.nbytes : stop].view(_torch_type(array))
            for array, stop in zip(arrays, ends, strict=True)
        ]

    def used(self, mark: Mark) -> None:
        """What was sent up to here may be written over once `mark` is reached."""
        for at in self._sent:
            self._marks[at] = mark
        self._sent.clear()

    def _take(self, num_bytes: int) -> torch.Tensor:
        at = self._next
        self._next = (at + 1) % BLOCKS
        assert at not in self._sent, "more blocks in one step than there are"
        self._sent.append(at)
        mark = self._marks[at]
        if mark is not None and not mark.is_reached():
            mark.wait()
        if self._blocks[at].numel() < num_bytes:
            self._blocks[at] = self._block(2 * num_bytes)
        return self._blocks[at]

    def _block(self, num_bytes: int) -> torch.Tensor:
        is_pinned = self._device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def aligned(offset: int) -> int:
    """The next offset at which an array may begin."""
    return -(-offset // ALIGN) * ALIGN


def _torch_type(array: Array) -> torch.dtype:
    return torch.int32 if array.dtype == np.int32 else torch.int64
