"""Two results side by side."""

from __future__ import annotations

from bench.report import Summary

FIGURES = (
    ("output_tok_per_s", None, True),
    ("request_per_s", None, True),
    ("cache_hit_rate", None, True),
    ("ttft_ms", "p50", False),
    ("ttft_ms", "p99", False),
    ("tpot_ms", "p50", False),
    ("itl_ms", "p99", False),
    ("e2e_ms", "p50", False),
    ("client_queue_ms", "p99", False),
    ("goodput_per_s", None, True),
)  # name, part, whether more is better


def compare(before: Summary, after: Summary) -> str:
    """A table: figure, before, after, change; `+` where it got better, `-` where it got worse. Goodput
    only if both have it, for the same goals."""
    lines = [f"{'figure':<20}{'before':>12}{'after':>12}{'change':>10}"]
    has_same_goals = "goals_s" in before and before["goals_s"] == after.get("goals_s")
    for name, part, more_is_better in FIGURES:
        if name == "goodput_per_s" and not has_same_goals:
            continue
        old = before[name] if part is None else before[name][part]
        new = after[name] if part is None else after[name][part]
        change = (new - old) / old if old else 0.0
        mark = " " if abs(change) < 0.01 else "+" if (change > 0) == more_is_better else "-"
        label = name if part is None else f"{name} {part}"
        lines.append(f"{label:<20}{old:>12.3f}{new:>12.3f}{change:>+9.1%}{mark}")
    return "\n".join(lines)
