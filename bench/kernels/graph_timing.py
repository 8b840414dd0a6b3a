# mypy: disable-error-code="no-untyped-call"
"""Times launches on a GPU: all calls in one CUDA graph, as a decode step runs them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def time_calls(
    calls: Sequence[Callable[[], object]], *, rounds: int = 5, at_least: int = 16
) -> float:
    """Microseconds a call, the median of `rounds` replays. The calls are run in turn, more than once if
    there are fewer than `at_least`; give each its own data if the cache must not have it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    repeats = -(-at_least // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    taken: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return statistics.median(taken)
