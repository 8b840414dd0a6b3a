"""Why a prefix match ended where it did."""

from __future__ import annotations

from itertools import islice

from srt.cache.node import TOKEN_BYTES, Node, decode, shared_tokens
from srt.wire.params import CacheReport

# A busy branch has thousands of children. Looking at the newest ones bounds the cost of a report;
# where more diverge in one place, `theirs` names the tokens of these.
NUM_COMPARED = 64
NUM_NAMED = 8


def explain_match(
    node: Node, num_shared: int, end: int, *, key: bytes, num_usable: int, page_bytes: int
) -> CacheReport:
    """`node`, `num_shared`, `end`: where a descent along `key` ended (see `RadixCache`). `num_usable`:
    the tokens that could have been matched; `key` holds the whole pages of them."""
    position = end // TOKEN_BYTES
    if end == len(key):
        reason = "page_rounding" if position < num_usable else "end_of_prompt"
        return CacheReport(matched_tokens=position, position=position, reason=reason)
    ours = key[end : end + page_bytes]
    rivals = _next_pages(node, num_shared, page_bytes)
    if not rivals:
        reason = "end_of_cache" if position else "empty"
        return CacheReport(matched_tokens=position, position=position, reason=reason)
    shared = [shared_tokens(ours, theirs) for theirs in rivals]
    furthest = max(shared)
    named = {
        decode(theirs)[furthest]
        for theirs, num in zip(rivals, shared, strict=True)
        if num == furthest
    }
    return CacheReport(
        matched_tokens=position,
        position=position,
        reason="diverged",
        ours=decode(ours)[furthest],
        theirs=sorted(named)[:NUM_NAMED],
    )


def _next_pages(node: Node, num_shared: int, page_bytes: int) -> list[bytes]:
    """The pages of tokens that are cached right behind the match."""
    if num_shared < len(node.pages):
        start = num_shared * page_bytes
        return [node.key[start : start + page_bytes]]
    return list(islice(reversed(node.children), NUM_COMPARED))
