"""The radix tree: hand-made cases for each thing it promises."""

from __future__ import annotations

from itertools import count

import pytest

from srt.cache.no_cache import NoCache
from srt.cache.radix import RadixCache


class Pages:
    """Hands out fresh page numbers and inserts prompts the way a finished request does."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.fresh = count(1)

    def put(self, tokens: list[int], salt: str = "") -> list[int]:
        num = len(tokens) // self.cache.page_size
        match = self.cache.match(tokens, salt, len(tokens))
        pages = match.pages + [next(self.fresh) for _ in range(num - len(match.pages))]
        kept, handle = self.cache.insert(tokens, salt, pages, match.handle)
        self.cache.release(handle)
        self.cache.check()
        return kept


def made(page_size: int = 1, policy: str = "lru") -> tuple[RadixCache, Pages]:
    cache = RadixCache(page_size, policy)  # type: ignore[arg-type]
    return cache, Pages(cache)


def spread(letters: str, page_size: int) -> list[int]:
    """A page per letter, each token different within it."""
    return [ord(letter) * 100 + slot for letter in letters for slot in range(page_size)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_many_branches(page_size: int) -> None:
    cache, pages = made(page_size)
    words = ["abcdef", "abcxyz", "abq", "zz", "abcdefgh", "abcxy"]
    kept = {word: pages.put(spread(word, page_size)) for word in words}
    assert kept["abcdef"][:3] == kept["abcxyz"][:3] and kept["abq"][:2] == kept["abcdef"][:2]
    assert kept["abcdefgh"][:6] == kept["abcdef"] and kept["abcxy"] == kept["abcxyz"][:5]
    assert cache.num_pages == cache.num_evictable == len(set(sum(kept.values(), []))) == 14
    for word in words:
        match = cache.match(spread(word, page_size), "", 999)
        assert match.pages == kept[word] and match.num_tokens == len(word) * page_size
        cache.release(match.handle)
    assert cache.peek(spread("abcxQ", page_size), "", 999) == 4 * page_size
    cache.check()


def test_mismatch_in_the_first_and_in_the_second_page() -> None:
    cache, pages = made(16)
    kept = pages.put(spread("abc", 16))
    for broken, expected in [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2)]:
        tokens = spread("abc", 16)
        tokens[broken] = 7
        match = cache.match(tokens, "", 48)
        assert match.pages == kept[:expected] and match.num_tokens == 16 * expected
        assert match.report.reason == "diverged" and match.report.position == 16 * expected
        assert match.report.ours == 7
        assert match.report.theirs == [spread("abc", 16)[broken]]
        cache.release(match.handle)
        cache.check()


def test_an_unaligned_tail_is_neither_kept_nor_matched() -> None:
    cache, pages = made(16)
    tokens = spread("abc", 16)
    assert len(pages.put(tokens[:47])) == 2
    assert cache.peek(tokens, "", 48) == 32
    assert cache.peek(tokens, "", 31) == 16 and cache.peek(tokens, "", 15) == 0


def test_a_locked_path_outlives_every_eviction() -> None:
    cache, pages = made()
    kept = pages.put(spread("abcdef", 1))
    pages.put(spread("abxy", 1))
    match = cache.match(spread("abcd", 1), "", 4)
    assert cache.num_evictable == 4
    assert sorted(cache.evict(100)) == sorted([*kept[4:], *range(7, 9)])
    assert cache.num_pages == 4 and cache.num_evictable == 0 and cache.evict(1) == []
    cache.check()
    assert cache.locked_pages(match.handle) == match.pages == kept[:4]
    cache.release(match.handle)
    assert sorted(cache.evict(100)) == sorted(kept[:4]) and cache.num_pages == 0
    cache.check()


def test_a_split_keeps_both_halves_locked() -> None:
    cache, pages = made()
    kept = pages.put(spread("abcdef", 1))
    whole = cache.match(spread("abcdef", 1), "", 6)
    half = cache.match(spread("abcX", 1), "", 4)
    assert half.pages == kept[:3] and cache.evict(100) == []
    cache.check()
    cache.release(half.handle)
    assert cache.evict(100) == [] and cache.locked_pages(whole.handle) == kept
    cache.release(whole.handle)
    half = cache.match(spread("abc", 1), "", 3)
    assert sorted(cache.evict(100)) == kept[3:]
    cache.check()
    cache.release(half.handle)
    assert cache.num_evictable == 3


def test_lru_and_lfu_disagree_as_they_should() -> None:
    for policy, first in [("lru", "a"), ("lfu", "b")]:
        cache, pages = made(policy=policy)
        kept = {word: pages.put(spread(word, 1)) for word in ("a", "b")}
        for word in ("a", "a", "b"):  # a is used more often, b more recently
            cache.release(cache.match(spread(word, 1), "", 1).handle)
        assert cache.evict(1) == kept[first], policy
        cache.check()


def test_lru_order_is_refreshed_by_match_but_not_by_peek() -> None:
    cache, pages = made()
    kept = {word: pages.put(spread(word, 1)) for word in "abcd"}
    cache.release(cache.match(spread("a", 1), "", 1).handle)
    cache.peek(spread("b", 1), "", 1)
    assert cache.evict(3) == kept["b"] + kept["c"] + kept["d"]
    assert cache.evict(1) == kept["a"]


def test_eviction_gives_exactly_what_was_asked_from_the_ends() -> None:
    cache, pages = made(16)
    kept = pages.put(spread("abcdef", 16))
    assert cache.evict(2) == kept[4:] and cache.num_pages == cache.num_evictable == 4
    cache.check()
    assert cache.evict(0) == [] and cache.peek(spread("abcdef", 16), "", 96) == 64
    assert pages.put(spread("abcdef", 16))[:4] == kept[:4]
    assert len(cache.evict(7)) == 6 and cache.num_pages == 0


def test_salts_share_nothing() -> None:
    cache, pages = made()
    plain, salted = pages.put(spread("abc", 1)), pages.put(spread("abc", 1), "adapter")
    assert not set(plain) & set(salted)
    assert cache.peek(spread("abc", 1), "other", 3) == 0
    match = cache.match(spread("abc", 1), "other", 3)
    assert match.pages == [] and match.report.reason == "empty"
    cache.release(match.handle)
    match = cache.match(spread("abc", 1), "adapter", 3)
    assert sorted(cache.evict(99)) == sorted(plain)
    cache.release(match.handle)
    assert cache.flush() and cache.num_pages == 0
    cache.check()


def test_duplicates_stay_with_the_caller() -> None:
    cache, _ = made()
    one, two = (cache.match([1, 2, 3], "", 3) for _ in range(2))
    kept, first = cache.insert([1, 2, 3], "", [11, 12, 13], one.handle)
    assert kept == [11, 12, 13]
    kept, second = cache.insert([1, 2, 3, 4], "", [21, 22, 23, 24], two.handle)
    assert kept == [11, 12, 13, 24] and cache.num_pages == 4
    cache.check()
    cache.release(first)
    assert cache.evict(99) == []
    cache.release(second)
    assert sorted(cache.flush()) == [11, 12, 13, 24]


@pytest.mark.parametrize(
    ("prompt", "limit", "reason", "position", "ours", "theirs"),
    [
        ([1, 2, 3, 4, 9, 9], 6, "diverged", 4, 9, [5, 8]),
        ([1, 2, 7, 7, 5, 6], 6, "diverged", 2, 7, [3]),
        ([1, 2, 3, 9, 5, 6], 6, "diverged", 2, 9, [4]),
        ([9, 9, 9, 9, 9, 9], 6, "diverged", 0, 9, [1]),
        ([1, 2, 3, 4, 5, 6, 7, 7], 8, "end_of_cache", 6, None, []),
        ([1, 2, 3, 4], 4, "end_of_prompt", 4, None, []),
        ([1, 2, 3, 4], 3, "page_rounding", 2, None, []),
        ([1], 1, "page_rounding", 0, None, []),
    ],
)
def test_why_a_match_ended(
    prompt: list[int],
    limit: int,
    reason: str,
    position: int,
    ours: int | None,
    theirs: list[int],
) -> None:
    cache, pages = made(2)
    pages.put([1, 2, 3, 4, 5, 6])
    pages.put([1, 2, 3, 4, 8, 6])
    report = cache.match(prompt, "", limit).report
    assert (report.reason, report.position, report.ours, report.theirs) == (
        reason,
        position,
        ours,
        theirs,
    )
    assert report.matched_tokens == position


def test_reports_of_an_empty_cache_and_of_none() -> None:
    assert made(2)[0].match([1, 2, 3], "", 3).report.reason == "empty"
    cache = NoCache()
    match = cache.match([1, 2, 3], "", 3)
    assert match.report.reason == "disabled" and match.pages == []
    assert cache.insert([1, 2, 3], "", [1, 2, 3], match.handle) == ([], match.handle)
    cache.release(match.handle)
    assert not cache.live_handles()


def test_a_hot_leaf_does_not_grow_the_queue() -> None:
    cache, pages = made()
    pages.put(spread("abc", 1))
    for _ in range(2000):
        cache.release(cache.match(spread("abc", 1), "", 3).handle)
    assert len(cache._queue._heap) < 200
    cache.check()


def test_check_sees_a_wrong_tree() -> None:
    cache, pages = made()
    pages.put(spread("abc", 1))
    leaf = next(iter(cache._roots[""].children.values()))
    leaf.num_locks = 1
    with pytest.raises(AssertionError, match="1 locks, but 0 handles"):
        cache.check()
    leaf.num_locks = 0
    leaf.pages[1] = leaf.pages[0]
    with pytest.raises(AssertionError, match="twice"):
        cache.check()
