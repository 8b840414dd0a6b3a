"""Where values are counted. One registry per process; the scheduler's travels as a plain snapshot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from srt.metrics.table import PREFIX, ROWS, Row

Labels = tuple[str, ...]


class _Histogram:
    """Counts per bucket (not cumulative); the last count is for values above every bound."""

    __slots__ = ("counts", "total")

    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * (num_buckets + 1)
        self.total = 0.0


class Registry:
    """Counters, gauges and histograms named in a table. An unknown name or a wrong number of labels
    is a bug in the caller and fails an assertion; no value is ever negative."""

    def __init__(self, rows: Iterable[Row] = ROWS) -> None:
        self._rows = {row.name: row for row in rows}
        self._values: dict[str, dict[Labels, float]] = {
            row.name: {} if row.labels else {(): 0.0}
            for row in self._rows.values()
            if row.kind != "histogram"
        }
        self._histograms: dict[str, dict[Labels, _Histogram]] = {
            row.name: {} if row.labels else {(): _Histogram(len(row.buckets))}
            for row in self._rows.values()
            if row.kind == "histogram"
        }

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Raises a counter. A negative amount is an error: counters only grow."""
        assert self._rows[name].kind == "counter" and len(labels) == len(self._rows[name].labels)
        assert amount >= 0, f"counter {name} cannot fall by {-amount}"
        values = self._values[name]
        values[labels] = values.get(labels, 0.0) + amount

    def add_each(self, name: str, amounts: Mapping[str, float]) -> None:
        """Raises a counter with one label, by label. A clock that steps back counts as 0."""
        assert self._rows[name].kind == "counter" and len(self._rows[name].labels) == 1
        values = self._values[name]
        for label, amount in amounts.items():
            values[(label,)] = values.get((label,), 0.0) + max(amount, 0.0)

    def put(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge."""
        assert self._rows[name].kind == "gauge" and len(labels) == len(self._rows[name].labels)
        assert value >= 0, f"gauge {name} cannot be {value}"
        self._values[name][labels] = value

    def put_all(self, name: str, values: dict[str, float]) -> None:
        """Sets a one-label gauge for exactly these label values; those seen before and absent now
        become 0, so that a reason that no longer holds does not linger."""
        for labels in self._values[name]:
            self._values[name][labels] = 0.0
        for label, value in values.items():
            self.put(name, value, label)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Counts a value in a histogram. A clock that steps back counts as 0."""
        self._count(name, labels, value, 1)

    def observe_all(self, name: str, counts: Iterable[tuple[float, int]]) -> None:
        """Counts values in a histogram without labels, each so many times."""
        for value, count in counts:
            self._count(name, (), value, count)

    def observe_each(self, name: str, values: Mapping[str, float]) -> None:
        """Counts a value for each label of a histogram with one label."""
        for label, value in values.items():
            self._count(name, (label,), value, 1)

    def _count(self, name: str, labels: Labels, value: float, count: int) -> None:
        histogram = self._histograms[name].get(labels)
        if histogram is None:
            assert len(labels) == len(self._rows[name].labels)
            histogram = self._histograms[name][labels] = _Histogram(len(self._rows[name].buckets))
        value = max(value, 0.0)
        histogram.counts[bisect_left(self._rows[name].buckets, value)] += count
        histogram.total += value * count

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Plain data: {full name: {"type", "help", "samples"}}.

        A sample of a counter or gauge is [labels, value]; one of a histogram is
        [labels, {"counts", "sum", "count"}] with non-cumulative counts, one more than `buckets`
        (beside "samples") has bounds. Labels are a dict of strings.
        """
        result: dict[str, dict[str, Any]] = {}
        for name, row in self._rows.items():
            entry: dict[str, Any] = {"type": row.kind, "help": row.help}
            if row.kind == "histogram":
                entry["buckets"] = list(row.buckets)
                entry["samples"] = [
                    [
                        dict(zip(row.labels, labels, strict=True)),
                        {"counts": list(h.counts), "sum": h.total, "count": sum(h.counts)},
                    ]
                    for labels, h in sorted(self._histograms[name].items())
                ]
            else:
                entry["samples"] = [
                    [dict(zip(row.labels, labels, strict=True)), value]
                    for labels, value in sorted(self._values[name].items())
                ]
            result[PREFIX + name] = entry
        return result
