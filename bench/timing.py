"""Time alternatives fairly on a machine that drifts: rounds that run each once, in turn."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds a call. `spread`: from the 10th to the 90th percentile of the rounds."""

    best: float
    median: float
    spread: float
    rounds: int


def interleave(
    candidates: dict[str, Callable[[], object]], *, seconds: float = 1.0, max_rounds: int = 200
) -> dict[str, Timing]:
    """Each round calls every candidate, starting one further on: no one always follows the same."""
    calls = list(candidates.items())
    for _, call in calls:
        call()
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    while len(taken[calls[0][0]]) < max_rounds:
        for name, call in calls:
            begin = time.perf_counter()
            call()
            taken[name].append((time.perf_counter() - begin) * 1e3)
        calls = calls[1:] + calls[:1]
        if time.perf_counter() > end and len(taken[calls[0][0]]) >= 3:
            break
    return {name: summarize(times) for name, times in taken.items()}


def summarize(times: list[float]) -> Timing:
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(
        best=min(times),
        median=statistics.median(times),
        spread=deciles[-1] - deciles[0],
        rounds=len(times),
    )


def report(benchmark: str, cases: Iterable[tuple[str, dict[str, Callable[[], object]]]]) -> None:
    """A line per case as it is done, best and median of each candidate in ms; then all as JSON."""
    done: dict[str, dict[str, dict[str, float]]] = {}
    for case, candidates in cases:
        timings = interleave(candidates)
        done[case] = {name: asdict(timing) for name, timing in timings.items()}
        columns = (f"{name} {t.best:.3f} ({t.median:.3f})" for name, t in timings.items())
        print(f"{benchmark} {case:32}", "  ".join(columns), flush=True)
    print(json.dumps({"benchmark": benchmark, "unit": "ms", "cases": done}))
