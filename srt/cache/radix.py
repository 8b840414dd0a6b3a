"""The radix prefix cache: a compressed tree over page-sized chunks of tokens, one root per salt.

        root(salt) --[A B C]-- node --[D]----- node      [..] are pages; a path from a root spells
                                 `----[E F]--- node      a prompt, and owns the pages of its KV

A match that ends inside a node splits it, so that a lock covers exactly what was matched. Only
unlocked leaves are evicted, from their ends, so what is left is always a set of whole prefixes.
"""

from __future__ import annotations

from srt.cache.eviction import EvictionPolicy, EvictionQueue
from srt.cache.explain import explain_match
from srt.cache.node import TOKEN_BYTES, Node, encode, shared_pages
from srt.cache.radix_check import find_problems
from srt.protocols.prefix_cache import Match


class RadixCache:
    """A `PrefixCache`. Matching and inserting cost O(tokens) byte compares plus O(nodes on the path)."""

    def __init__(self, page_size: int, policy: EvictionPolicy = "lru") -> None:
        assert page_size >= 1
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._nowhere = Node()  # the empty tree: where a match under an unknown salt ends
        self._queue = EvictionQueue(policy)
        self._handles: dict[int, Node] = {}  # the last node of the locked path
        self._num_handles = 0
        self._clock = 0
        self._num_pages = 0
        self._num_evictable = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    def match(self, tokens: list[int], salt: str, limit: int) -> Match:
        limit = min(limit, len(tokens))
        key = self._encode(tokens, limit)
        node, num_shared, end = self._descend(key, salt)
        report = explain_match(
            node, num_shared, end, key=key, num_usable=limit, page_bytes=self._page_bytes
        )
        if num_shared < len(node.pages):
            node = self._split(node, num_shared)
        self._touch(node, is_hit=True)
        handle = self._lock(node)
        return Match(
            pages=_path_pages(node),
            num_tokens=end // TOKEN_BYTES,
            handle=handle,
            report=report,
        )

    def peek(self, tokens: list[int], salt: str, limit: int) -> int:
        _, _, end = self._descend(self._encode(tokens, min(limit, len(tokens))), salt)
        return end // TOKEN_BYTES

    def insert(
        self, tokens: list[int], salt: str, pages: list[int], handle: int
    ) -> tuple[list[int], int]:
        key = self._encode(tokens, len(pages) * self.page_size)
        assert len(key) == len(pages) * self._page_bytes, "fewer tokens than pages to hold them"
        node, num_shared, end = self._descend(key, salt)
        if num_shared < len(node.pages):
            node = self._split(node, num_shared)
        new = pages[end // self._page_bytes :]
        if new:
            node = self._attach(node, salt, key[end:], new)
        self._touch(node, is_hit=False)
        new_handle = self._lock(node)  # before the old one goes: the path is never without a lock
        self.release(handle)
        return _path_pages(node), new_handle

    def release(self, handle: int) -> None:
        node = self._handles.pop(handle)
        while node.parent is not None:
            node.num_locks -= 1
            if node.num_locks == 0:
                self._num_evictable += len(node.pages)
                if not node.children:
                    self._queue.push(node)
            node = node.parent

    def evict(self, num_pages: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_pages and (leaf := self._queue.pop()) is not None:
            wanted = min(num_pages - len(freed), len(leaf.pages))
            freed += leaf.pages[-wanted:]
            if wanted == len(leaf.pages):
                self._remove(leaf)
            else:
                del leaf.pages[-wanted:]
                leaf.key = leaf.key[: len(leaf.pages) * self._page_bytes]
                self._queue.push(leaf)
        self._num_pages -= len(freed)
        self._num_evictable -= len(freed)
        return freed

    def flush(self) -> list[int]:
        return self.evict(self._num_evictable)

    def owned_pages(self) -> list[int]:
        found: list[int] = []
        unseen = list(self._roots.values())
        while unseen:
            node = unseen.pop()
            found += node.pages
            unseen += node.children.values()
        return found

    def live_handles(self) -> set[int]:
        return set(self._handles)

    def locked_pages(self, handle: int) -> list[int]:
        return _path_pages(self._handles[handle])

    def problems(self) -> list[str]:
        return find_problems(
            self._roots,
            self._handles,
            page_bytes=self._page_bytes,
            num_pages=self._num_pages,
            num_evictable=self._num_evictable,
            queued=self._queue.members(),
        )

    def check(self) -> None:
        """Raises AssertionError, naming every broken invariant."""
        if found := self.problems():
            raise AssertionError("; ".join(found))

    def _encode(self, tokens: list[int], limit: int) -> bytes:
        """The whole pages of `tokens[:limit]`."""
        return encode(tokens[: max(limit, 0) // self.page_size * self.page_size])

    def _descend(self, key: bytes, salt: str) -> tuple[Node, int, int]:
        """Follows `key` as far as the tree goes: the node where that ends, how many of that node's
        pages agree, and the bytes of `key` that were found."""
        node = self._roots.get(salt, self._nowhere)
        num_shared = end = 0
        while num_shared == len(node.pages):
            child = node.children.get(key[end : end + self._page_bytes])
            if child is None:
                break
            node = child
            num_shared = shared_pages(node.key, key, end, self._page_bytes)
            end += num_shared * self._page_bytes
        return node, num_shared, end

    def _split(self, node: Node, num_kept: int) -> Node:
        """Puts the first `num_kept` pages of `node` into a new node above it, and returns that one.

        `node` itself keeps the lower part, so handles that end there and its place in the eviction
        queue stay right; whoever locked the lower part has locked the upper part too.
        """
        parent = node.parent
        assert parent is not None and 0 < num_kept < len(node.pages)
        cut = num_kept * self._page_bytes
        upper = Node(
            key=node.key[:cut],
            pages=node.pages[:num_kept],
            parent=parent,
            num_locks=node.num_locks,
            last_used=node.last_used,
            num_hits=node.num_hits,
        )
        parent.children[node.key[: self._page_bytes]] = upper
        upper.children[node.key[cut : cut + self._page_bytes]] = node
        node.key = node.key[cut:]
        node.pages = node.pages[num_kept:]
        node.parent = upper
        return upper

    def _attach(self, parent: Node, salt: str, key: bytes, pages: list[int]) -> Node:
        if parent is self._nowhere:
            parent = self._roots.setdefault(salt, Node(salt=salt))
        node = Node(key=key, pages=pages, parent=parent)
        parent.children[key[: self._page_bytes]] = node
        self._num_pages += len(pages)
        self._num_evictable += len(pages)
        return node

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.parent = None
        if parent.is_evictable_leaf():
            self._queue.push(parent)
        elif parent.parent is None and not parent.children:
            del self._roots[parent.salt]

    def _touch(self, node: Node, *, is_hit: bool) -> None:
        self._clock += 1
        while node.parent is not None:
            node.last_used = self._clock
            node.num_hits += is_hit
            node = node.parent

    def _lock(self, node: Node) -> int:
        """Locks the path that ends in `node`. The caller has just touched it: a queued entry of it
        is stale either way."""
        self._num_handles += 1
        self._handles[self._num_handles] = node
        while node.parent is not None:
            if node.num_locks == 0:
                self._num_evictable -= len(node.pages)
            node.num_locks += 1
            node = node.parent
        return self._num_handles


def _path_pages(node: Node) -> list[int]:
    runs = []
    while node.parent is not None:
        runs.append(node.pages)
        node = node.parent
    return [page for run in reversed(runs) for page in run]
