"""What one running request holds of the KV memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srt.protocols.forward_batch import TableWrite
from srt.protocols.prefix_cache import Match

if TYPE_CHECKING:
    from srt.cache.store import KVStore


class Lease:
    """A row of the runner's tables and an ordered list of pages. Made by `KVStore.open`.

        pages    [ p0  p1  p2 | p3  p4  p5 ]
                  0           |            len(pages)
                  belong to   num_protected
                  the cache;                the rest is owned by this lease
                  our handle locks them
        tokens   [0 ........... committed) have their KV in these pages, in launch order
                 [committed ..... capacity) room that `grow` has taken; capacity = pages * page_size

    Pages leave a lease in two ways only, and each shortens or replaces `pages` in the same breath:
    to the cache (`checkpoint`) or to the free list (`release`). So a page cannot be freed twice, and
    no page can be freed while the table still shows it: every change is in the next `table_write`.
    """

    def __init__(self, store: KVStore, row: int, match: Match, salt: str) -> None:
        self.row = row
        self.salt = salt
        self.pages = list(match.pages)
        self.num_protected = len(match.pages)
        self.committed = match.num_tokens
        self.handle = match.handle
        self.capacity = len(match.pages) * store.page_size  # tokens that fit into the pages held
        self.is_open = True
        self._store = store
        self._first_unwritten = 0  # pages from here on are not in the runner's table yet
        self.needs_write = bool(match.pages)  # whether there are any

    def missing_pages(self, num_tokens: int) -> int:
        """Pages that `grow(num_tokens)` would have to take."""
        return max(0, -(-num_tokens // self._store.page_size) - len(self.pages))

    def grow(self, num_tokens: int) -> bool:
        """Makes room for `num_tokens` in all, evicting from the cache where the free list is short.
        False: there is not enough, and nothing was changed."""
        assert self.is_open
        taken = self._store.take(self.missing_pages(num_tokens))
        if taken is None:
            return False
        if taken:
            self.pages += taken
            self.capacity = len(self.pages) * self._store.page_size
            self.needs_write = True
        return True

    def commit(self, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is in place, or will be before any later step."""
        assert self.is_open and self.committed <= num_tokens <= self.capacity
        self.committed = num_tokens

    def checkpoint(self, tokens: list[int]) -> list[int]:
        """Offers the full pages of `tokens[:committed]` to the cache.

            offered   [ 0 .... num_protected | .... committed // page_size )    then a tail we keep
            taken as  [ the cache's already  | the cache's now: same page, or its own copy of it ]

        Where the cache had the same tokens in another page, that page takes the place of ours, and
        ours is freed. Returns these duplicates; they are back on the free list.
        """
        assert self.is_open and len(tokens) >= self.committed
        num_full = self.committed // self._store.page_size
        if num_full <= self.num_protected:
            return []
        offered = self.pages[:num_full]
        kept, self.handle = self._store.cache.insert(tokens, self.salt, offered, self.handle)
        assert kept[: self.num_protected] == offered[: self.num_protected], "a locked page moved"
        duplicates = []
        for index in range(self.num_protected, len(kept)):
            if kept[index] != offered[index]:
                duplicates.append(offered[index])
                self._first_unwritten = min(self._first_unwritten, index)
                self.needs_write = True
        self.pages[: len(kept)] = kept
        self.num_protected = max(self.num_protected, len(kept))
        self._store.pages.free(duplicates)
        return duplicates

    def table_write(self) -> TableWrite | None:
        """What the runner's page table does not show yet, as one write; the caller must send it with
        the next step that uses this row."""
        first = self._first_unwritten
        self.needs_write = False
        if first == len(self.pages):
            return None
        self._first_unwritten = len(self.pages)
        return TableWrite(row=self.row, first=first, pages=self.pages[first:])

    def release(self, tokens: list[int] | None = None) -> None:
        """Gives everything back: owned pages and row to their free lists, locks to the cache. With
        `tokens`, the full committed pages are offered to the cache first. The lease is dead then."""
        if tokens is not None:
            self.checkpoint(tokens)
        assert self.is_open, "this lease was released before"
        self.is_open = False
        owned, self.pages = self.pages[self.num_protected :], []
        self.num_protected = self.committed = self.capacity = 0
        self._store.close(self, owned)
