"""Random operations on the tree and on leases, against a dict model and the audit."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from srt.cache.lease import Lease
from srt.cache.no_cache import NoCache
from srt.cache.radix import RadixCache
from srt.cache.store import KVStore

TOKENS = st.lists(st.integers(0, 2), max_size=12)
SALTS = st.sampled_from(["", "b"])


class TreeMachine(RuleBasedStateMachine):
    """The model maps (salt, page-aligned prefix) to the page that holds its last page of tokens."""

    @initialize(page_size=st.sampled_from([1, 2, 3]), policy=st.sampled_from(["lru", "lfu"]))
    def make(self, page_size: int, policy: Any) -> None:
        self.cache = RadixCache(page_size, policy)
        self.size = page_size
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}
        self.held: dict[int, list[int]] = {}
        self.next_page = 1

    def prefix(self, tokens: list[int], salt: str, limit: int) -> list[int]:
        pages: list[int] = []
        for end in range(self.size, min(limit, len(tokens)) + 1, self.size):
            page = self.model.get((salt, tuple(tokens[:end])))
            if page is None:
                break
            pages.append(page)
        return pages

    @rule(tokens=TOKENS, salt=SALTS, limit=st.integers(0, 14))
    def match(self, tokens: list[int], salt: str, limit: int) -> None:
        expected = self.prefix(tokens, salt, limit)
        assert self.cache.peek(tokens, salt, limit) == len(expected) * self.size
        match = self.cache.match(tokens, salt, limit)
        assert match.pages == expected and match.num_tokens == len(expected) * self.size
        assert match.report.matched_tokens == match.report.position == match.num_tokens
        self.held[match.handle] = expected

    @rule(tokens=TOKENS, salt=SALTS)
    def insert(self, tokens: list[int], salt: str) -> None:
        match = self.cache.match(tokens, salt, len(tokens))
        num = len(tokens) // self.size
        fresh = list(range(self.next_page, self.next_page + num - len(match.pages)))
        self.next_page += num
        kept, handle = self.cache.insert(tokens, salt, match.pages + fresh, match.handle)
        for index, page in enumerate(kept):
            self.model.setdefault((salt, tuple(tokens[: (index + 1) * self.size])), page)
        assert kept == self.prefix(tokens, salt, len(tokens)) and len(kept) == num
        self.held[handle] = kept

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.held)))
        self.cache.release(handle)
        del self.held[handle]

    @rule(num=st.integers(0, 6))
    def evict(self, num: int) -> None:
        locked = {page for pages in self.held.values() for page in pages}
        evictable = set(self.model.values()) - locked
        freed = self.cache.evict(num)
        assert len(freed) == min(num, len(evictable)) and set(freed) <= evictable
        self.model = {key: page for key, page in self.model.items() if page not in freed}

    @invariant()
    def is_consistent(self) -> None:
        self.cache.check()
        locked = {page for pages in self.held.values() for page in pages}
        assert sorted(self.cache.owned_pages()) == sorted(self.model.values())
        assert self.cache.num_pages == len(self.model)
        assert self.cache.num_evictable == len(self.model) - len(locked)
        for handle, pages in self.held.items():
            assert self.cache.locked_pages(handle) == pages


class LeaseMachine(RuleBasedStateMachine):
    """Requests that share few tokens run in a small pool. Every slot remembers the prefix whose KV was
    last written into it; what a request's table shows must always be its own prefix."""

    @initialize(page_size=st.sampled_from([1, 2]), is_cached=st.booleans())
    def make(self, page_size: int, is_cached: bool) -> None:
        self.size = page_size
        cache = RadixCache(page_size) if is_cached else NoCache()
        self.store = KVStore(num_pages=14, page_size=page_size, max_rows=3, cache=cache)
        self.table: dict[int, list[int]] = {row: [0] * 32 for row in range(3)}
        self.slots: dict[int, tuple[int, ...]] = {}
        self.live: dict[int, tuple[Lease, list[int]]] = {}

    def slot(self, row: int, position: int) -> int:
        return self.table[row][position // self.size] * self.size + position % self.size

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def start(self, tokens: list[int]) -> None:
        match = self.store.cache.match(tokens, "", len(tokens) - 1)
        lease = self.store.open(match, "")
        if lease is None:
            assert len(self.live) == 3
            self.store.cache.release(match.handle)
            return
        if not lease.grow(len(tokens)):
            assert lease.missing_pages(len(tokens)) > self.store.num_available
            lease.release()
            return
        self.live[lease.row] = (lease, list(tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1), offers=st.booleans())
    def step(self, data: st.DataObject, token: int, offers: bool) -> None:
        """Computes all that is known, checks the KV that attention would read, adds a token."""
        row = data.draw(st.sampled_from(sorted(self.live)))
        lease, tokens = self.live[row]
        if not lease.grow(len(tokens)):
            return
        if (write := lease.table_write()) is not None:
            self.table[row][write.first : write.first + len(write.pages)] = write.pages
        for position in range(lease.committed, len(tokens)):
            self.slots[self.slot(row, position)] = tuple(tokens[: position + 1])
        lease.commit(len(tokens))
        if offers:
            lease.checkpoint(tokens)
        if len(tokens) < 20:
            tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), offers=st.booleans())
    def finish(self, data: st.DataObject, offers: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.live)))
        lease, tokens = self.live.pop(row)
        lease.release(tokens if offers else None)

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @invariant()
    def is_consistent(self) -> None:
        assert self.store.audit() == []
        for row, (lease, tokens) in self.live.items():
            if (write := lease.table_write()) is not None:
                self.table[row][write.first : write.first + len(write.pages)] = write.pages
            for position in range(lease.committed):
                assert self.slots[self.slot(row, position)] == tuple(tokens[: position + 1])

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for lease, tokens in self.live.values():
            lease.release(tokens)
        self.store.flush()
        assert self.store.audit() == []
        assert self.store.pages.num_free == self.store.pages.total


FEW = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestTree = TreeMachine.TestCase
TestTree.settings = FEW
TestLeases = LeaseMachine.TestCase
TestLeases.settings = FEW
