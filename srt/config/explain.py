"""Every value with its source and its reason, as plain rows and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from srt.config.bags import BAGS
from srt.config.resolve import Resolution
from srt.config.runner_spec import RunnerSpec

NAMESPACES = frozenset(bag.namespace for bag in BAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`group` is a namespace, or the label of a runner. `replaced` is what stood there before."""

    group: str
    name: str
    value: Any
    source: str
    reason: str
    replaced: Any = None


def explain(resolution: Resolution) -> list[Row]:
    """One row per value: bag by bag, then runner by runner, each in its declared order."""
    spec = [field.name for field in fields(RunnerSpec)]
    order = [(bag.namespace, name) for bag in BAGS for name in bag.leaf_types]
    order += [(runner.label, name) for runner in resolution.runners for name in spec]
    rows = []
    for entry in resolution.trail:
        group, _, name = entry.field.partition(".")
        rows.append(
            Row(
                group=group,
                name=name,
                value=entry.value,
                source=entry.source,
                reason=entry.reason,
                replaced=entry.replaced,
            )
        )
    return sorted(rows, key=lambda row: order.index((row.group, row.name)))


def render_table(rows: Sequence[Row]) -> str:
    """Text for a terminal: the bags, then the runners side by side, then why each has what it has."""
    bag_rows = [row for row in rows if row.group in NAMESPACES]
    runner_rows = [row for row in rows if row.group not in NAMESPACES]
    labels = list(dict.fromkeys(row.group for row in runner_rows))
    names = list(dict.fromkeys(row.name for row in runner_rows))
    values = {(row.group, row.name): _show(row.value) for row in runner_rows}
    table = [[name, *(values.get((label, name), "-") for label in labels)] for name in names]
    why = ["value", "source", "reason"]
    parts = []
    if bag_rows:
        parts.append(_columns(["setting", *why], _lines(bag_rows)))
    if runner_rows:
        parts.append(_columns(["runner", *labels], table))
        parts.append(_columns(["runner setting", *why], _lines(runner_rows)))
    return "\n\n".join(parts) + "\n"


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    return [[f"{row.group}.{row.name}", _show(row.value), row.source, _reason(row)] for row in rows]


def _reason(row: Row) -> str:
    if row.replaced is None or row.replaced == "auto":
        return row.reason
    return f"{row.reason} (replaced {_show(row.replaced)})"


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _columns(titles: list[str], lines: list[list[str]]) -> str:
    """Left-aligned columns, two spaces apart; the last one ragged."""
    table = [titles, *lines]
    widths = [max(len(line[i]) for line in table) for i in range(len(titles))]
    table.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )
