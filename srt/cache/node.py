"""A node of the radix tree: a run of whole pages that every prompt through it shares."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

TOKEN_TYPE = "i"  # token ids are kept as native 32-bit ints, so comparing a run is one memcmp
TOKEN_BYTES = array(TOKEN_TYPE).itemsize


def encode(tokens: list[int]) -> bytes:
    return array(TOKEN_TYPE, tokens).tobytes()


def decode(key: bytes) -> list[int]:
    return array(TOKEN_TYPE, key).tolist()


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """`key` is the encoded tokens of `pages`, `page_size` tokens each.

    A root has no parent, no key and no pages; only roots carry a `salt`. A node that was taken out
    of the tree has no parent either. `children` is keyed by the child's first page of tokens.
    `num_locks` counts the handles whose path runs through the node, so a child never has more than
    its parent.
    """

    key: bytes = b""
    pages: list[int] = field(default_factory=list)
    parent: Node | None = None
    children: dict[bytes, Node] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0  # the tree's clock, not seconds
    num_hits: int = 0
    salt: str = ""

    def is_evictable_leaf(self) -> bool:
        return self.parent is not None and not self.children and self.num_locks == 0


def shared_pages(edge: bytes, key: bytes, start: int, page_bytes: int) -> int:
    """How many whole pages at the beginning of `edge` equal those of `key[start:]`."""
    if key.startswith(edge, start):
        return len(edge) // page_bytes
    low, high = 0, min(len(edge), len(key) - start) // page_bytes
    while low < high:  # the first `low` pages are equal; not more than `high` can be
        middle = (low + high + 1) // 2
        begin, end = low * page_bytes, middle * page_bytes
        if edge[begin:end] == key[start + begin : start + end]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_tokens(left: bytes, right: bytes) -> int:
    """Tokens on which two encoded pages of equal length agree before they first differ."""
    difference = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    if not difference:
        return len(left) // TOKEN_BYTES
    lowest_bit = (difference & -difference).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)
