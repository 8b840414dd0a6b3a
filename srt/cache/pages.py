"""Which pages of the KV pool are free. Numbers only; the tensors are in `srt.cache.pools`."""

from __future__ import annotations


class PageAllocator:
    """The free list of pages 1 .. num_pages - 1. Page 0 is padding and is never handed out.

    A freed page is the next one to be given away: it is the one most likely still in a CPU cache.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "a pool needs the padding page and one more"
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack; its end is given away first
        self._is_free = bytearray(b"\1" * num_pages)
        self._is_free[0] = 0

    @property
    def total(self) -> int:
        """Pages that can be handed out: all but the padding page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num: int) -> list[int] | None:
        """`num` pages, or None and nothing taken."""
        assert num >= 0
        if num > len(self._free):
            return None
        cut = len(self._free) - num
        taken = self._free[cut:]
        taken.reverse()
        del self._free[cut:]
        for page in taken:
            self._is_free[page] = 0
        return taken

    def free(self, pages: list[int]) -> None:
        for page in pages:
            assert 0 < page < self.num_pages, f"page {page} is not one of ours"
            assert not self._is_free[page], f"page {page} is free already"
            self._is_free[page] = 1
        self._free.extend(reversed(pages))

    def free_pages(self) -> list[int]:
        """A copy of the free list, for audits."""
        return list(self._free)
