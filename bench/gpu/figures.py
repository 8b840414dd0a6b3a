"""Numbers and words about what an engine gave."""

from __future__ import annotations

from typing import Any

from bench.report import percentile

Figures = dict[str, Any]


def gap_figures(gaps: list[float]) -> Figures:
    """Of the times between two tokens of a request, seconds."""
    median, late = percentile(gaps, 0.5) * 1e3, percentile(gaps, 0.99) * 1e3
    return {
        "itl_ms_p50": median,
        "itl_ms_p99": late,
        "itl_ms_max": max(gaps, default=0.0) * 1e3,
        "p99_by_p50": late / median if median else 0.0,
    }


def step_sums(groups: dict[str, Figures]) -> Figures:
    """Of a run's steps, those with prompts and the others: how many, and seconds of the loop, of the
    host beside waiting, and of the device: medians of each group, added up. `groups`: see
    `srt.scheduler.profile`."""
    found: Figures = {}
    for name, group in groups.items():
        kind = "prefill" if name == "prefill" else "decode"
        sums = found.setdefault(kind, {"steps": 0, "wall_s": 0.0, "host_s": 0.0, "device_s": 0.0})
        steps = group["steps"]
        host = sum(seconds for stage, seconds in group["stages"].items() if stage != "wait")
        sums["steps"] += steps
        sums["wall_s"] += steps * group["step_seconds"]
        sums["host_s"] += steps * host
        sums["device_s"] += steps * group["phases"]["forward"]
    return found


def compare(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """ "yes", or where they part, and how many of all tokens come before that."""
    agreed = [_agreed(one, other) for one, other in zip(ours, theirs, strict=True)]
    parted = [n for n, count in enumerate(agreed) if count < max(len(ours[n]), len(theirs[n]))]
    if not parted:
        return "yes"
    share = sum(agreed) / sum(map(len, ours))
    return (
        f"NO: request {parted[0]} parts at token {agreed[parted[0]]}; {len(parted)} of {len(ours)} "
        f"do; {share:.1%} of the tokens come before"
    )


def _agreed(one: list[int], other: list[int]) -> int:
    """How many tokens from the start are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
