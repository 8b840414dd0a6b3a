"""Who gets how much of the one KV budget. Pure arithmetic on bytes and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from srt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """One runner's wish. Runners share page ids, so every pool gets the same number of pages."""

    owner: str
    bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """`num_pages` counts the padding page 0; `bytes` is by owner, padding included."""

    num_pages: int
    bytes: dict[str, int]


def size_pools(
    needs: list[PoolNeed],
    *,
    budget_bytes: int,
    max_total_tokens: int,
    page_size: int,
    context_length: int,
) -> PoolSizes:
    """As many whole pages as both the budget and `max_total_tokens` allow; the padding page, which no
    token can use, comes on top of both.

    Raises ConfigError with need, have and the largest usable context when one request of full length
    would not fit.
    """
    per_token = sum(need.bytes_per_token for need in needs)
    affordable = budget_bytes // per_token
    usable = min(affordable, max_total_tokens) // page_size
    if usable * page_size < context_length:
        limit = "kv_memory_gb" if affordable < max_total_tokens else "max_total_tokens"
        needed = -(-context_length // page_size) * page_size
        raise ConfigError(
            f"context_length {context_length} needs {needed} KV tokens "
            f"({needed * per_token / 1e9:.3f} GB); {limit} leaves "
            f"{usable * page_size}. Raise {limit} or set context_length to at most "
            f"{usable * page_size}"
        )
    num_pages = usable + 1
    return PoolSizes(
        num_pages=num_pages,
        bytes={need.owner: num_pages * page_size * need.bytes_per_token for need in needs},
    )
