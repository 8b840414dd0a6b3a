"""Which cached page goes first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Literal

from srt.cache.node import Node

EvictionPolicy = Literal["lru", "lfu"]
Rank = tuple[int, int]


def rank_by_recency(node: Node) -> Rank:
    return (node.last_used, 0)


def rank_by_hits(node: Node) -> Rank:
    """Fewest matches first; among equals, the one unused for longest."""
    return (node.num_hits, node.last_used)


def ranking(policy: EvictionPolicy) -> Callable[[Node], Rank]:
    return rank_by_recency if policy == "lru" else rank_by_hits


class EvictionQueue:
    """The evictable leaves, lowest rank first. Push and pop cost O(log n), amortised.

    Entries are dropped lazily: one counts only if its node is still an evictable leaf and still has
    the rank it was pushed with. A rank changes only while a node is locked, so pushing a leaf when
    its last lock goes is enough.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._rank = ranking(policy)
        self._heap: list[tuple[Rank, int, Node]] = []
        self._num_pushed = 0  # breaks ties, so that nodes are never compared
        self._compact_at = 64

    def push(self, node: Node) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (self._rank(node), self._num_pushed, node))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def pop(self) -> Node | None:
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if node.is_evictable_leaf() and self._rank(node) == rank:
                return node
        return None

    def _compact(self) -> None:
        """Keeps one valid entry a node. Runs each time the heap has doubled."""
        kept: dict[int, tuple[Rank, int, Node]] = {}
        for entry in self._heap:
            rank, _, node = entry
            if node.is_evictable_leaf() and self._rank(node) == rank:
                kept[id(node)] = entry
        self._heap = list(kept.values())
        heapq.heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + 64

    def members(self) -> set[int]:
        """`id` of every node with a valid entry, for checks."""
        return {
            id(node)
            for rank, _, node in self._heap
            if node.is_evictable_leaf() and self._rank(node) == rank
        }
