"""A prefix cache: which prompt prefixes already have their KV in pages. Pure: page ids, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from srt.wire.params import CacheReport


@dataclass(slots=True, kw_only=True)
class Match:
    """Pages of the longest cached prefix, page aligned. The path stays locked (neither evicted nor
    freed) until `release(handle)`."""

    pages: list[int]
    num_tokens: int
    handle: int
    report: CacheReport


class PrefixCache(Protocol):
    """Owns the pages it was given by `insert`. A page belongs to the free list, to one lease or to the
    cache, never to two of them. `salt` separates prompts whose tokens are equal but whose KV is not."""

    def match(self, tokens: list[int], salt: str, limit: int) -> Match:
        """Longest cached prefix of `tokens[:limit]`, locked. Refreshes recency."""
        ...

    def peek(self, tokens: list[int], salt: str, limit: int) -> int:
        """Length of that prefix, in tokens. Locks nothing, refreshes nothing."""
        ...

    def insert(
        self, tokens: list[int], salt: str, pages: list[int], handle: int
    ) -> tuple[list[int], int]:
        """Offer whole pages for `tokens` (len(pages) * page_size of them); the first ones are those the
        handle already locks. Returns the cache's own pages for the same tokens and a handle that locks
        them all instead of the old one. Where these differ from the offered ones, the offered page was a
        duplicate and stays the caller's. The list may be shorter than what was offered: the rest was not
        taken and stays the caller's too."""
        ...

    def release(self, handle: int) -> None:
        """Unlocks its pages; they stay cached until they are evicted. The handle is void after."""
        ...

    def evict(self, num_pages: int) -> list[int]:
        """Gives up to `num_pages` unlocked pages back, in the policy's order."""
        ...

    def flush(self) -> list[int]:
        """Gives every unlocked page back. With no request running that is all of them."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages the cache owns, locked or not."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could give back now."""
        ...

    # What an audit reads; each may cost a walk over everything cached.

    def owned_pages(self) -> list[int]:
        """Every page it owns, each once."""
        ...

    def live_handles(self) -> set[int]:
        """Handles that were given out and not released."""
        ...

    def locked_pages(self, handle: int) -> list[int]:
        """The pages a handle locks, in prompt order."""
        ...

    def problems(self) -> list[str]:
        """Everything derived again from scratch; one sentence for each broken invariant."""
        ...
