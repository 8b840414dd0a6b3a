"""What it means: the figures of a run, a table for people and one JSON line for programs."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from bench.record import Record

Summary = dict[str, Any]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float], scale: float = 1000.0) -> dict[str, float]:
    """Mean and percentiles, milliseconds by default."""
    mean = sum(values) / len(values) if values else 0.0
    return {
        "mean": round(mean * scale, 3),
        "p50": round(percentile(values, 0.50) * scale, 3),
        "p90": round(percentile(values, 0.90) * scale, 3),
        "p99": round(percentile(values, 0.99) * scale, 3),
        "max": round(max(values, default=0.0) * scale, 3),
    }


def summarize(
    records: list[Record],
    wall: float,
    *,
    goal_ttft: float | None = None,
    goal_tpot: float | None = None,
) -> Summary:
    """`goal_*` in seconds: goodput is the rate of requests that meet every goal given."""
    good = [record for record in records if record.is_ok]
    out_tokens = sum(record.completion_tokens for record in good)
    in_tokens = sum(record.prompt_tokens for record in good)
    cached = sum(record.cached_tokens for record in good)
    within = [
        record
        for record in good
        if (goal_ttft is None or record.ttft <= goal_ttft)
        and (goal_tpot is None or (record.tpot or 0.0) <= goal_tpot)
    ]
    summary: Summary = {
        "requests": len(records),
        "failed": len(records) - len(good),
        "errors": sorted({record.error for record in records if record.error})[:5],
        "wall_s": round(wall, 3),
        "request_per_s": round(len(good) / wall, 3),
        "output_tok_per_s": round(out_tokens / wall, 2),
        "total_tok_per_s": round((in_tokens + out_tokens) / wall, 2),
        "input_tokens": in_tokens,
        "output_tokens": out_tokens,
        "cache_hit_rate": round(cached / in_tokens, 4) if in_tokens else 0.0,
        "mean_concurrency": round(sum(record.e2e for record in good) / wall, 2),
        "ttft_ms": spread([record.ttft for record in good]),
        "tpot_ms": spread([record.tpot for record in good if record.tpot is not None]),
        "itl_ms": spread([gap for record in good for gap in record.itl]),
        "largest_gap_ms": spread([record.largest_gap for record in good]),
        "e2e_ms": spread([record.e2e for record in good]),
        "client_queue_ms": spread([record.queued for record in good]),
    }
    if goal_ttft is not None or goal_tpot is not None:
        summary["goodput_per_s"] = round(len(within) / wall, 3)
        summary["goals_s"] = {"ttft": goal_ttft, "tpot": goal_tpot}
    return summary


def render(title: str, summary: Summary) -> str:
    """The table for people. Where every request failed there is nothing to measure: the errors alone."""
    errors = [f"  error: {error}" for error in summary["errors"]]
    if 0 < summary["failed"] == summary["requests"]:
        count = f"  {summary['requests']} requests, {summary['failed']} failed"
        return "\n".join([title, count, *errors])
    lines = [
        title,
        f"  {summary['requests']} requests, {summary['failed']} failed, {summary['wall_s']} s, "
        f"mean concurrency {summary['mean_concurrency']}",
        f"  output {summary['output_tok_per_s']} tok/s, in and out {summary['total_tok_per_s']} "
        f"tok/s, cache hit rate {summary['cache_hit_rate']:.1%}",
    ]
    if "goodput_per_s" in summary:
        lines.append(f"  goodput {summary['goodput_per_s']} requests/s within {summary['goals_s']}")
    lines.append(
        f"  {'ms':<14}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max"))
    )
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "largest_gap_ms", "e2e_ms", "client_queue_ms"):
        cells = "".join(f"{value:>10.1f}" for value in summary[name].values())
        lines.append(f"  {name[:-3]:<14}{cells}")
    return "\n".join([*lines, *errors])


def describe_engine(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """What was measured: an engine's answer about its configuration, without the trail. None for a
    server that has no such answer."""
    if config is None:
        return None
    names = ("config_hash", "bags", "runners", "versions")
    return {name: config[name] for name in names if name in config}


def describe_machine() -> dict[str, object]:
    """What the numbers were measured on."""
    model = ""
    try:
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    except OSError:
        pass
    return {
        "cpu": model or platform.processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
