"""Memory for packed weights: large anonymous mappings that the kernel may back with huge pages.

A step reads every weight once; with 4 KiB pages the address translations alone cost a third of the
bandwidth, and the hardware prefetcher stops at each page's end.
"""

from __future__ import annotations

import mmap

import torch

HUGE_PAGE = 2 << 20
CHUNK_BYTES = 32 << 20
ALIGNMENT = 128


class Arena:
    """Hands out pieces of its chunks. A chunk's memory is freed with the last tensor that uses it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8, zeroed, aligned to 128 bytes."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._chunk):
            self._chunk = map_chunk(max(size, CHUNK_BYTES))
        piece, self._chunk = self._chunk[:nbytes], self._chunk[size:]
        return piece


def map_chunk(size: int) -> torch.Tensor:
    mapping = mmap.mmap(-1, size + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + size]
