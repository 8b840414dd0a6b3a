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


def compare(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """ "yes", or where they part."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            place = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1
            )
            differing = sum(a != b for a, b in zip(ours, theirs, strict=True))
            return f"NO: request {number} parts at token {place}; {differing} of {len(ours)} differ"
    return "yes"
