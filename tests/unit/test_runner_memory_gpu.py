"""What is measured on a GPU takes the place of what was estimated, with both in the trail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from config_gpu import gpu_facts

from srt.config.args import ServerArgs
from srt.config.context import RuntimeContext
from srt.config.footprint import reserve_of
from srt.errors import ConfigError
from srt.runner.memory import MEASURED, PoolNeed, measured_budget, settle_kv_budget

GB = 1_000_000_000
NEEDS = [PoolNeed(owner="target", bytes_per_token=131_072)]


def loading(**fields: Any) -> RuntimeContext:
    context = RuntimeContext()
    context.publish(ServerArgs(**fields), gpu_facts(), role="test", entropy=1)
    context.start_loading()
    return context


@pytest.fixture
def context() -> Iterator[RuntimeContext]:
    yield loading()


def test_budget_is_what_is_free_less_share_and_reserve() -> None:
    assert measured_budget(total=100, free=60, fraction=0.9, reserve=5) == 45
    assert measured_budget(total=100, free=10, fraction=0.9, reserve=5) == 0
    assert measured_budget(total=100, free=60, fraction=1.0, reserve=0) == 60


def test_measured_takes_the_place_of_the_estimate(context: RuntimeContext) -> None:
    before = context.state.ledger.trail[:]
    estimate = next(e.value for e in before if e.field == "memory.kv_memory_gb")
    settle_kv_budget(context, NEEDS, total=150 * GB, free=130 * GB)
    budget = context.state.memory.kv_memory_gb
    assert 110 < budget < 115 and budget != estimate
    tokens = context.state.schedule.max_total_tokens
    assert tokens % 16 == 0 and (tokens + 16) * 131_072 <= budget * GB < (tokens + 32) * 131_072
    entry = next(e for e in reversed(context.trail) if e.field == "memory.kv_memory_gb")
    assert (entry.source, entry.value, entry.replaced) == (MEASURED, budget, estimate)
    assert "130.00 of 150.00 GB are free" in entry.reason and "were estimated" in entry.reason


def test_what_was_named_is_kept_if_it_fits() -> None:
    for fields in ({"kv_memory_gb": 20.0}, {"max_total_tokens": 140_000}):
        context = loading(**fields)
        before = context.state.memory.kv_memory_gb
        settle_kv_budget(context, NEEDS, total=150 * GB, free=130 * GB)
        assert context.state.memory.kv_memory_gb == before
        assert MEASURED not in [entry.source for entry in context.trail]


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"kv_memory_gb": 100.0}, "--kv-memory-gb"),
        ({"max_total_tokens": 700_001}, "--max-total-tokens"),
    ],
)
def test_what_was_named_and_does_not_fit(fields: dict[str, Any], flag: str) -> None:
    context = loading(**fields)
    with pytest.raises(ConfigError) as raised:
        settle_kv_budget(context, NEEDS, total=150 * GB, free=60 * GB)
    message = str(raised.value)
    assert message.startswith((f"{flag} needs 91.", f"{flag} needs 100.00 GB"))
    assert "60.00 of 150.00 GB are free" in message
    tokens = int(message.rpartition("--max-total-tokens ")[2])
    settle_kv_budget(
        loading(max_total_tokens=tokens), NEEDS, total=150 * GB, free=60 * GB
    )  # the largest usable value of the message is usable


def test_a_context_that_does_not_fit_names_the_largest_that_does(context: RuntimeContext) -> None:
    with pytest.raises(ConfigError) as raised:
        settle_kv_budget(context, NEEDS, total=150 * GB, free=30 * GB)
    message = str(raised.value)
    assert "context_length 131072 needs 17.18 GB" in message
    length = int(message.partition("--context-length to ")[2].split()[0])
    shorter = loading(context_length=length)
    settle_kv_budget(shorter, NEEDS, total=150 * GB, free=30 * GB)
    assert shorter.state.schedule.max_total_tokens == length


def test_fewer_pages_than_requests_lower_the_requests() -> None:
    context = loading(context_length=64)
    (spec,) = context.runner_specs
    reserve = reserve_of(
        context.facts.model, "bfloat16", step_tokens=8192, rows=256, graph_sizes=spec.graph_sizes
    )
    pages = 101 * 16 * 131_072
    settle_kv_budget(context, NEEDS, total=150 * GB, free=15 * GB + reserve.total + pages)
    assert context.state.schedule.max_total_tokens == 1600
    assert context.state.schedule.max_running == 100


def test_measuring_comes_before_anybody_reads_the_estimate(context: RuntimeContext) -> None:
    with context.building("a pool"):
        assert context.state.memory.kv_memory_gb > 0
    with pytest.raises(ConfigError, match="a pool was built with"):
        settle_kv_budget(context, NEEDS, total=150 * GB, free=130 * GB)
