"""The prefix cache that keeps nothing."""

from __future__ import annotations

from srt.protocols.prefix_cache import Match
from srt.wire.params import CacheReport


class NoCache:
    """A `PrefixCache` without pages: every match is empty, every offer is declined."""

    def __init__(self) -> None:
        self._handles: set[int] = set()
        self._num_handles = 0

    @property
    def num_pages(self) -> int:
        return 0

    @property
    def num_evictable(self) -> int:
        return 0

    def match(self, tokens: list[int], salt: str, limit: int) -> Match:
        self._num_handles += 1
        self._handles.add(self._num_handles)
        return Match(
            pages=[],
            num_tokens=0,
            handle=self._num_handles,
            report=CacheReport(reason="disabled"),
        )

    def peek(self, tokens: list[int], salt: str, limit: int) -> int:
        return 0

    def insert(
        self, tokens: list[int], salt: str, pages: list[int], handle: int
    ) -> tuple[list[int], int]:
        return [], handle

    def release(self, handle: int) -> None:
        self._handles.remove(handle)

    def evict(self, num_pages: int) -> list[int]:
        return []

    def flush(self) -> list[int]:
        return []

    def owned_pages(self) -> list[int]:
        return []

    def live_handles(self) -> set[int]:
        return set(self._handles)

    def locked_pages(self, handle: int) -> list[int]:
        assert handle in self._handles
        return []

    def problems(self) -> list[str]:
        return []
