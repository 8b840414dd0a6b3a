"""Who gets how much of the one KV budget, and how large that is once a GPU's weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from srt.config.context import RuntimeContext
from srt.config.footprint import reserve_of
from srt.errors import ConfigError

MEASURED = "memory measured after loading"


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


def measured_budget(*, total: int, free: int, fraction: float, reserve: int) -> int:
    """Bytes for the KV pools of a GPU whose weights are loaded: what is free, less the share that the
    engine leaves to others and less what its steps and graphs will take. All in bytes; at least 0."""
    return max(0, free - (total - int(fraction * total)) - reserve)


def settle_kv_budget(
    context: RuntimeContext, needs: Sequence[PoolNeed], *, total: int, free: int
) -> None:
    """Puts what was measured in the place of what `resolve` had estimated: `kv_memory_gb` and
    `max_total_tokens`, with both numbers in the trail. Called once while loading, when all weights are
    there and no pool is; `total` and `free` are the GPU's bytes, with no cached blocks left in between.

    What the user named is kept. Raises ConfigError with need, have and the largest usable value if that,
    or one request of full length, does not fit.
    """
    with context.building("kv budget"):
        state = context.state
        fraction, estimate = state.memory.gpu_memory_fraction, state.memory.kv_memory_gb
        page, running = state.schedule.page_size, state.schedule.max_running
        reserve = _reserve(context, state.schedule.max_step_tokens, running)
        budget = measured_budget(total=total, free=free, fraction=fraction, reserve=reserve)
        per_token = sum(need.bytes_per_token for need in needs)
        tokens = max(0, budget // per_token // page - 1) * page
        have = (
            f"{budget / 1e9:.2f} GB: {free / 1e9:.2f} of {total / 1e9:.2f} GB are free beside the "
            f"weights, less {1 - fraction:.0%} for others and {reserve / 1e9:.2f} GB for steps and "
            "graphs"
        )
        given = [name for name in ("kv_memory_gb", "max_total_tokens") if _was_given(context, name)]
        if given:
            _check_given(given, round(estimate * 1e9), budget, tokens, have)
            return
        length = context.target.context_length
        if tokens < length:
            needed = (-(-length // page) + 1) * page * per_token
            raise ConfigError(
                f"context_length {length} needs {needed / 1e9:.2f} GB of KV cache, but the GPU has "
                f"{have}; set --context-length to {tokens} or less, raise --gpu-memory-fraction, or "
                "lower --max-step-tokens"
            )
        fields: dict[str, int | float] = {
            "kv_memory_gb": budget / 1e9,
            "max_total_tokens": tokens,
        }
        if tokens // page < running:
            fields["max_running"] = tokens // page
        context.declare_load_time_override(
            MEASURED, fields, reason=f"{have}; {estimate:.2f} GB were estimated"
        )


def _reserve(context: RuntimeContext, step_tokens: int, rows: int) -> int:
    """What steps and graphs of all runners will take; a draft computes when the target does not."""
    facts = context.facts
    whole = None
    for spec in context.runner_specs:
        model = facts.model if spec.role == "target" or facts.draft is None else facts.draft
        one = reserve_of(
            model,
            spec.dtype,
            step_tokens=step_tokens,
            rows=rows,
            graph_sizes=spec.graph_sizes,
            prefix_chunk=context.state.schedule.max_prefix_chunk_tokens,
        )
        whole = one if whole is None else whole + one
    assert whole is not None, "there is a target"
    return whole.total


def _was_given(context: RuntimeContext, name: str) -> bool:
    """Whether the user named it: the first entry says so, or what the rule put in its place."""
    field = ("memory." if name == "kv_memory_gb" else "schedule.") + name
    first = next(entry for entry in context.trail if entry.field == field)
    return first.source in ("typed", "file") or first.replaced is not None


def _check_given(given: list[str], need: int, budget: int, tokens: int, have: str) -> None:
    if need > budget:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(
            f"{flags} needs {need / 1e9:.2f} GB for the KV cache, but the GPU has {have}; the most that "
            f"fits: --kv-memory-gb {budget // 1_000_000 / 1000:.3f} or --max-total-tokens {tokens}"
        )
