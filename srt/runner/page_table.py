"""The page table of a runner: which pages each row's tokens lie in."""

from __future__ import annotations

import numpy as np
import torch

from srt.protocols.forward_batch import TableWrite

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


class PageTable:
    """[max_rows + 1, max_pages] int32, on the host for index arithmetic and on the device for kernels;
    on a CPU the two are one memory. Entries that were never written are page 0, and the last row,
    which belongs to nobody, stays that way: padding computes on it."""

    def __init__(self, *, max_rows: int, max_pages: int, device: torch.device) -> None:
        backing = torch.zeros((max_rows + 1, max_pages), dtype=torch.int32)
        self.host: np.ndarray[tuple[int, int], np.dtype[np.int32]] = backing.numpy()
        self.tensor = backing.to(device)
        self.padding_row = max_rows
        self._is_shared = self.tensor.data_ptr() == backing.data_ptr()

    def write(self, writes: list[TableWrite]) -> None:
        """Both sides, now."""
        where, pages = self.note(writes)
        if len(where):
            device = self.tensor.device
            index = torch.from_numpy(where).to(device).long()
            self.tensor.view(-1)[index] = torch.from_numpy(pages).to(device)

    def note(self, writes: list[TableWrite]) -> tuple[Ints, Ints]:
        """The host's side. What the device's lacks yet: indices into its flat table, and their pages."""
        width = self.host.shape[1]
        for change in writes:
            last = change.first + len(change.pages)
            self.host[change.row, change.first : last] = change.pages
        if self._is_shared or not writes:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        spans = [(c.row * width + c.first, len(c.pages)) for c in writes]
        where = np.concatenate([np.arange(at, at + num, dtype=np.int32) for at, num in spans])
        return where, self.host.reshape(-1)[where]
