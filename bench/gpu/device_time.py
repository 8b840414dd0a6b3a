"""How long the device computed, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN = 12
NAME_LENGTH = 60


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Milliseconds; nothing without a GPU. `busy`: when any kernel was there. Kernels that start early,
    to wait on the device for the one before them, overlap: those by name add up to more than that."""

    busy_ms: float
    by_kernel: dict[str, tuple[float, int]]  # total, calls

    def minus(self, other: DeviceTimes) -> DeviceTimes:
        """What this run had more than the other one."""
        left: dict[str, tuple[float, int]] = {}
        for name, (total, calls) in self.by_kernel.items():
            less, fewer = other.by_kernel.get(name, (0.0, 0))
            if calls > fewer:
                left[name] = (max(0.0, total - less), calls - fewer)
        return DeviceTimes(self.busy_ms - other.busy_ms, left)

    def top(self, steps: int) -> list[dict[str, object]]:
        """The longest, per step: milliseconds and calls."""
        longest = sorted(self.by_kernel.items(), key=lambda item: -item[1][0])[:SHOWN]
        return [
            {"name": name[:NAME_LENGTH], "ms": total / steps, "calls": calls / steps}
            for name, (total, calls) in longest
        ]


def device_times(work: Callable[[], object]) -> DeviceTimes:
    """Runs `work` under the profiler."""
    if not torch.cuda.is_available():
        return DeviceTimes(0.0, {})
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, int]] = {}
    spans: list[tuple[float, float]] = []
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            began, ended = event.time_range.start, event.time_range.end  # microseconds
            total, calls = found.get(event.name, (0.0, 0))
            found[event.name] = (total + (ended - began) / 1e3, calls + 1)
            spans.append((began, ended))
    return DeviceTimes(covered(spans) / 1e3, found)


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of their union."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total
