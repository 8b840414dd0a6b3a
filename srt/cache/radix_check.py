"""Everything a radix tree claims about itself, derived again from its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from srt.cache.node import Node


def find_problems(
    roots: dict[str, Node],
    handles: dict[int, Node],
    *,
    page_bytes: int,
    num_pages: int,
    num_evictable: int,
    queued: set[int],
) -> list[str]:
    """One sentence for each broken invariant. `queued` holds the `id` of every node in the eviction
    queue. O(pages + locked paths); nothing is changed."""
    locks: Counter[int] = Counter()
    for node in handles.values():
        while node.parent is not None:
            locks[id(node)] += 1
            node = node.parent
    found: list[str] = []
    nodes = list(_walk(roots, found))
    pages = [page for node in nodes for page in node.pages]
    if len(pages) != num_pages:
        found.append(f"the tree counts {num_pages} pages and holds {len(pages)}")
    if len(set(pages)) != len(pages):
        found.append("a page is in the tree twice")
    if 0 in pages:
        found.append("the padding page is in the tree")
    evictable = sum(len(node.pages) for node in nodes if locks[id(node)] == 0)
    if evictable != num_evictable:
        found.append(f"the tree counts {num_evictable} evictable pages and holds {evictable}")
    for node in nodes:
        name = f"the node with page {node.pages[0] if node.pages else None}"
        if not node.pages or len(node.key) != len(node.pages) * page_bytes:
            found.append(f"{name} has {len(node.pages)} pages for {len(node.key)} bytes of tokens")
        if node.num_locks != locks[id(node)]:
            found.append(f"{name} has {node.num_locks} locks, but {locks[id(node)]} handles")
        if node.is_evictable_leaf() and id(node) not in queued:
            found.append(f"{name} is an evictable leaf that is not queued for eviction")
        locks.pop(id(node), None)
    if locks:
        found.append(f"{len(locks)} locked nodes are not in the tree")
    return found


def _walk(roots: dict[str, Node], found: list[str]) -> Iterator[Node]:
    """All nodes but the roots; reports broken links on the way."""
    for salt, root in roots.items():
        if root.parent is not None or root.pages or root.key or root.salt != salt:
            found.append(f"the root of salt {salt!r} is not one")
        if not root.children:
            found.append(f"the root of salt {salt!r} has no children")
    unseen = list(roots.values())
    while unseen:
        node = unseen.pop()
        for key, child in node.children.items():
            if child.parent is not node or not child.key.startswith(key):
                found.append(f"the child with page {child.pages[:1]} is linked wrongly")
            unseen.append(child)
            yield child
