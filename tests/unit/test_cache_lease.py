"""Leases, allocators, the store and its audit."""

from __future__ import annotations

import pytest

from srt.cache.lease import Lease
from srt.cache.no_cache import NoCache
from srt.cache.pages import PageAllocator
from srt.cache.radix import RadixCache
from srt.cache.slots import RowAllocator
from srt.cache.store import KVStore


def made(page_size: int, num_pages: int = 200) -> KVStore:
    return KVStore(
        num_pages=num_pages, page_size=page_size, max_rows=4, cache=RadixCache(page_size)
    )


def started(store: KVStore, tokens: list[int]) -> Lease:
    lease = store.open(store.cache.match(tokens, "", len(tokens) - 1), "")
    assert lease is not None and lease.grow(len(tokens))
    return lease


def test_pages_are_all_or_nothing_and_never_page_zero() -> None:
    pages = PageAllocator(5)
    assert pages.total == pages.num_free == 4
    assert pages.allocate(5) is None and pages.num_free == 4
    first = pages.allocate(4)
    assert first is not None and sorted(first) == [1, 2, 3, 4]
    assert pages.allocate(1) is None and pages.allocate(0) == []
    pages.free([3, 1])
    assert pages.allocate(2) == [3, 1]
    pages.free([2])
    for wrong in ([2], [0], [5]):
        with pytest.raises(AssertionError):
            pages.free(wrong)


def test_rows_come_back() -> None:
    rows = RowAllocator(2)
    assert [rows.allocate(), rows.allocate(), rows.allocate()] == [0, 1, None]
    rows.free(1)
    assert rows.num_free == 1 and rows.used_rows() == {0} and rows.allocate() == 1
    rows.free(0)
    with pytest.raises(AssertionError):
        rows.free(0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_two_equal_prompts_computed_at_once_end_up_on_the_same_pages(page_size: int) -> None:
    """The second one's duplicates are freed, and its table must not show them any more."""
    store = made(page_size)
    prompt = list(range(64))
    table: dict[int, list[int]] = {row: [0] * 128 for row in range(4)}

    def sync(lease: Lease) -> None:
        if (write := lease.table_write()) is not None:
            assert write.row == lease.row
            table[lease.row][write.first : write.first + len(write.pages)] = write.pages

    one, two = started(store, prompt), started(store, prompt)
    for lease in (one, two):
        sync(lease)
        lease.commit(64)
    assert not set(one.pages) & set(two.pages)
    assert one.checkpoint(prompt) == []
    before = list(two.pages)
    assert two.checkpoint(prompt) == before and two.pages == one.pages
    assert store.audit() == []
    write = two.table_write()
    assert write is not None and write.first == 0 and write.pages == one.pages
    table[two.row][: len(write.pages)] = write.pages

    three = started(store, list(range(100, 164)))
    sync(three)
    assert set(three.pages) == set(before)  # the freed pages are in other hands now
    tokens = list(prompt)
    for step in range(50):
        tokens.append(1000 + step)
        assert two.grow(len(tokens))
        sync(two)
        two.commit(len(tokens))
        shown = table[two.row][: -(-len(tokens) // page_size)]
        assert shown == two.pages and not set(shown) & set(three.pages)
        assert store.audit() == []
    for lease, known in ((one, prompt), (two, tokens), (three, None)):
        lease.release(known)
        assert store.audit() == []
    assert not store.leases and store.cache.num_evictable == store.cache.num_pages
    assert store.pages.num_free + store.cache.num_pages == store.pages.total


def test_a_duplicate_in_the_middle_is_swapped_and_the_tail_kept() -> None:
    store = made(2)
    long, short = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4]
    one, two = started(store, long), started(store, short)
    two.commit(4)
    two.checkpoint(short)
    two.release(short)
    one.table_write()
    one.commit(7)
    mine = list(one.pages)
    assert one.checkpoint(long) == mine[:2]
    assert one.pages[2:] == mine[2:] and one.num_protected == 3
    write = one.table_write()
    assert write is not None and (write.first, write.pages) == (0, one.pages)
    assert one.table_write() is None and one.checkpoint(long) == []
    assert store.audit() == []


def test_growing_evicts_and_refuses_without_a_trace() -> None:
    store = made(1, num_pages=9)
    started_one = started(store, [1, 2, 3, 4, 5])
    started_one.commit(5)
    started_one.release([1, 2, 3, 4, 5])
    assert (store.cache.num_pages, store.pages.num_free, store.num_available) == (5, 3, 8)
    lease = started(store, [1, 2, 9, 9])
    assert lease.num_protected == 2 and lease.committed == 2
    assert not lease.grow(9) and len(lease.pages) == 4 and store.audit() == []
    assert lease.grow(8) and store.cache.num_pages == 2 and store.num_available == 0
    assert store.audit() == []
    lease.release()
    assert store.pages.num_free == 6 and store.flush() == 2 and store.audit() == []


def test_a_dead_lease_stays_dead() -> None:
    store = made(1)
    lease = started(store, [1, 2, 3])
    lease.release()
    for again in (lease.release, lambda: lease.grow(9), lambda: lease.commit(0)):
        with pytest.raises(AssertionError):
            again()
    assert store.audit() == []


def test_without_a_cache_everything_stays_owned() -> None:
    store = KVStore(num_pages=10, page_size=2, max_rows=1, cache=NoCache())
    lease = started(store, [1, 2, 3, 4])
    lease.commit(4)
    assert lease.checkpoint([1, 2, 3, 4]) == [] and lease.num_protected == 0
    match = store.cache.match([1], "", 0)
    assert store.open(match, "") is None
    store.cache.release(match.handle)
    lease.release([1, 2, 3, 4])
    assert store.pages.num_free == 9 and store.audit() == []


def test_the_audit_names_each_fault() -> None:
    store = made(1, num_pages=20)
    one, two = started(store, [1, 2, 3]), started(store, [4, 5, 6])
    assert store.audit() == []
    kept = two.pages[0]
    two.pages[0] = one.pages[0]
    assert any("belongs to row 0 and to row 1" in fault for fault in store.audit())
    two.pages[0] = kept
    lost = two.pages.pop()
    assert any("is not 19 pages" in fault for fault in store.audit())
    two.pages.append(lost)
    stray = store.cache.match([1], "", 1)
    assert store.audit() == [f"handles [{stray.handle}] are locked for nobody"]
    store.cache.release(stray.handle)
    row = store.rows.allocate()
    assert row is not None and any("rows" in fault for fault in store.audit())
    store.rows.free(row)
    two.num_protected = 1
    assert any("protects other pages" in fault for fault in store.audit())
    two.num_protected = 0
    assert store.audit() == []
