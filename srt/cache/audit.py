"""Is every page and every row where it should be? Runs in tests and on an idle server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from srt.cache.pages import PageAllocator
from srt.cache.slots import RowAllocator
from srt.protocols.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from srt.cache.lease import Lease


def audit(
    allocator: PageAllocator, rows: RowAllocator, cache: PrefixCache, leases: list[Lease]
) -> list[str]:
    """One sentence for each fault; empty when all is well. `leases` are all that are open, and no match
    may be pending. Costs a walk over everything; changes nothing.

    Holds: free + cached + owned = total; every page has one owner; the padding page has none; a
    lease's protected pages are those its handle locks; no handle and no row is without its lease.
    """
    return [
        *_audit_pages(allocator, cache, leases),
        *_audit_locks(cache, leases),
        *_audit_rows(rows, leases),
        *cache.problems(),
    ]


def _audit_pages(allocator: PageAllocator, cache: PrefixCache, leases: list[Lease]) -> list[str]:
    found = []
    owners: dict[int, str] = {}
    claims = [("the free list", allocator.free_pages()), ("the cache", cache.owned_pages())]
    claims += [(f"row {lease.row}", lease.pages[lease.num_protected :]) for lease in leases]
    for owner, pages in claims:
        for page in pages:
            if page in owners:
                found.append(f"page {page} belongs to {owners[page]} and to {owner}")
            if not 0 < page < allocator.num_pages:
                found.append(f"{owner} has page {page}, which is not one of the pool's")
            owners[page] = owner
    free, cached, *owned = (len(pages) for _, pages in claims)
    if free + cached + sum(owned) != allocator.total:
        found.append(
            f"free {free} + cached {cached} + owned {sum(owned)} is not {allocator.total} pages"
        )
    return found


def _audit_locks(cache: PrefixCache, leases: list[Lease]) -> list[str]:
    found = []
    live = cache.live_handles()
    for lease in leases:
        if lease.handle not in live:
            found.append(f"row {lease.row} has handle {lease.handle}, which the cache released")
        elif cache.locked_pages(lease.handle) != lease.pages[: lease.num_protected]:
            found.append(f"row {lease.row} protects other pages than its handle locks")
        if not lease.committed <= lease.capacity:
            found.append(f"row {lease.row} has {lease.committed} tokens in {lease.capacity} slots")
    if stray := live - {lease.handle for lease in leases}:
        found.append(f"handles {sorted(stray)} are locked for nobody")
    return found


def _audit_rows(rows: RowAllocator, leases: list[Lease]) -> list[str]:
    used, held = rows.used_rows(), [lease.row for lease in leases]
    found = []
    if len(set(held)) != len(held):
        found.append("two leases have the same row")
    if used != set(held):
        found.append(f"rows {sorted(used)} are in use, leases hold {sorted(held)}")
    if rows.num_free + len(used) != rows.total:
        found.append(f"{rows.num_free} free rows and {len(used)} used ones are not {rows.total}")
    return found
