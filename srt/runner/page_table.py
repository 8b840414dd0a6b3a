"""The page table of a runner: which pages each row's tokens lie in."""

from __future__ import annotations

import numpy as np
import torch

from srt.protocols.forward_batch import TableWrite


class PageTable:
    """[max_rows, max_pages] int32, on the host for index arithmetic and on the device for kernels. On a
    CPU the two are one memory. Entries that were never written are page 0."""

    def __init__(self, *, max_rows: int, max_pages: int, device: torch.device) -> None:
        backing = torch.zeros((max_rows, max_pages), dtype=torch.int32)
        self.host: np.ndarray[tuple[int, int], np.dtype[np.int32]] = backing.numpy()
        self.tensor = backing.to(device)
        self._backing = backing
        self._is_shared = self.tensor.data_ptr() == backing.data_ptr()

    def write(self, writes: list[TableWrite]) -> None:
        for change in writes:
            where = slice(change.first, change.first + len(change.pages))
            self.host[change.row, where] = change.pages
            if not self._is_shared:
                self.tensor[change.row, where] = self._backing[change.row, where]
