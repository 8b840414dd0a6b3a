"""Time on a GPU: calls recorded into one CUDA graph, so that no host stands in the way."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

LEAST_LAUNCHES = 60
ROUNDS = 7
COPY_BYTES = 1 << 30


def microseconds(
    calls: Sequence[Callable[[], object]], rounds: int = ROUNDS, at_least: int = LEAST_LAUNCHES
) -> float:
    """Device time of one call: the median of `rounds` replays of a graph that makes all of them in turn,
    and again until there are `at_least`. Give calls on different buffers, more than the caches hold."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    repeats = -(-at_least // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    taken: list[float] = []
    for _ in range(rounds):
        begin, end = make_event(), make_event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken) * 1e3 / (repeats * len(calls))


def make_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def memory_bandwidth() -> float:
    """Bytes per second, read and written, of a simple kernel over much more than the caches hold."""
    source = torch.zeros(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    times = microseconds([lambda: torch.neg(source, out=target)], rounds=3)
    return 2 * COPY_BYTES / (times * 1e-6)
