"""A step's plain numbers on their way to the device: gathered on the host, sent in one copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from srt.runner.timeline import Mark

ALIGN = 16  # bytes; every array starts where vector loads may read it
BLOCKS = 16  # more than two steps send, so with two in flight nobody waits for one

Array = np.ndarray[tuple[int], np.dtype[np.int32]] | np.ndarray[tuple[int], np.dtype[np.int64]]


class Staging:
    """Host blocks, pinned where the device reads them by itself. A block is written again only when the
    mark behind its last use is reached. If none is free, who sends waits for the oldest mark; if there
    is no mark, because the step itself holds all blocks, there is one more. So a step may send any
    number of them."""

    def __init__(self, device: torch.device, num_bytes: int = 1 << 20) -> None:
        self._device = device
        self._num_bytes = num_bytes
        self._free = [self._block(num_bytes) for _ in range(BLOCKS)]
        self._sent: list[torch.Tensor] = []  # without a mark yet
        self._read: deque[tuple[Mark, list[torch.Tensor]]] = deque()  # until a mark, oldest first

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
        if self._sent:
            self._read.append((mark, self._sent))
            self._sent = []

    def _take(self, num_bytes: int) -> torch.Tensor:
        while self._read and (not self._free or self._read[0][0].is_reached()):
            mark, blocks = self._read.popleft()
            mark.wait()
            self._free += blocks
        block = self._free.pop() if self._free else self._block(self._num_bytes)
        if block.numel() < num_bytes:
            block = self._block(2 * num_bytes)
        self._sent.append(block)
        return block

    def _block(self, num_bytes: int) -> torch.Tensor:
        is_pinned = self._device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def aligned(offset: int) -> int:
    """The next offset at which an array may begin."""
    return -(-offset // ALIGN) * ALIGN


def _torch_type(array: Array) -> torch.dtype:
    return torch.int32 if array.dtype == np.int32 else torch.int64
