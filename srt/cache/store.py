"""The KV memory of one runner as the scheduler sees it: free pages, rows, prefix cache, leases."""

from __future__ import annotations

from srt.cache.audit import audit
from srt.cache.lease import Lease
from srt.cache.pages import PageAllocator
from srt.cache.slots import RowAllocator
from srt.protocols.prefix_cache import Match, PrefixCache


class KVStore:
    """Joins the parts; the only place where a page passes from one of them to another.

    Admission: `match` the prompt in `cache` (that locks it), see whether the missing pages are
    `num_available`, then `open` a lease, or `cache.release(match.handle)` to let it be.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, max_rows: int, cache: PrefixCache
    ) -> None:
        self.page_size = page_size
        self.pages = PageAllocator(num_pages)
        self.rows = RowAllocator(max_rows)
        self.cache = cache
        self.leases: dict[int, Lease] = {}  # by row

    @property
    def num_available(self) -> int:
        """Pages that `take` could give: free ones and those the cache would give up."""
        return self.pages.num_free + self.cache.num_evictable

    def open(self, match: Match, salt: str) -> Lease | None:
        """A lease that starts with the matched pages and takes over the match's lock. None: every row
        is in use; the match is still the caller's."""
        row = self.rows.allocate()
        if row is None:
            return None
        lease = self.leases[row] = Lease(self, row, match, salt)
        return lease

    def take(self, num: int) -> list[int] | None:
        """`num` pages off the free list, topped up by eviction; all or nothing."""
        if num > self.num_available:
            return None
        if num > self.pages.num_free:
            self.pages.free(self.cache.evict(num - self.pages.num_free))
        return self.pages.allocate(num)

    def close(self, lease: Lease, owned: list[int]) -> None:
        """The end of `Lease.release`; nobody else calls it."""
        del self.leases[lease.row]
        self.cache.release(lease.handle)
        self.pages.free(owned)
        self.rows.free(lease.row)

    def flush(self) -> int:
        """Empties the cache of everything no lease uses. Returns the number of pages freed."""
        freed = self.cache.flush()
        self.pages.free(freed)
        return len(freed)

    def audit(self) -> list[str]:
        """See `srt.cache.audit`; empty when all is well."""
        return audit(self.pages, self.rows, self.cache, list(self.leases.values()))
