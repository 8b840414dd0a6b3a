from __future__ import annotations

import pytest

from srt.errors import ConfigError
from srt.runner.memory import PoolNeed, size_pools


def size(budget: int, tokens: int, *, page: int = 16, context: int = 64) -> tuple[int, int]:
    need = [PoolNeed(owner="target", bytes_per_token=100)]
    sizes = size_pools(
        need,
        budget_bytes=budget,
        max_total_tokens=tokens,
        page_size=page,
        context_length=context,
    )
    return sizes.num_pages, sizes.bytes["target"]


def test_the_smaller_limit_wins_and_the_padding_page_comes_on_top() -> None:
    assert size(100 * 160, 10_000) == (11, 11 * 16 * 100)
    assert size(100 * 10_000, 160) == (11, 11 * 16 * 100)
    assert size(100 * 79, 10_000) == (5, 5 * 16 * 100)


def test_two_runners_share_the_budget_by_their_bytes() -> None:
    needs = [
        PoolNeed(owner="target", bytes_per_token=90),
        PoolNeed(owner="draft", bytes_per_token=10),
    ]
    sizes = size_pools(
        needs, budget_bytes=6400, max_total_tokens=1000, page_size=16, context_length=64
    )
    assert sizes.num_pages == 5
    assert sizes.bytes == {"target": 7200, "draft": 800}


@pytest.mark.parametrize(
    ("budget", "tokens", "limit"),
    [(100 * 50, 10_000, "kv_memory_gb"), (10**9, 50, "max_total_tokens")],
)
def test_too_small_for_one_context_names_both_numbers(budget: int, tokens: int, limit: str) -> None:
    with pytest.raises(ConfigError) as raised:
        size(budget, tokens)
    message = str(raised.value)
    assert "context_length 64 needs 64" in message
    assert limit in message
    assert "at most 48" in message
