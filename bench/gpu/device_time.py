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
    """Milliseconds by kernel; empty without a GPU."""

    by_kernel: dict[str, tuple[float, int]]  # total, calls

    @property
    def total_ms(self) -> float:
        return sum(total for total, _ in self.by_kernel.values())

    def minus(self, other: DeviceTimes) -> DeviceTimes:
        """What this run had more than the other one."""
        left: dict[str, tuple[float, int]] = {}
        for name, (total, calls) in self.by_kernel.items():
            less, fewer = other.by_kernel.get(name, (0.0, 0))
            if calls > fewer:
                left[name] = (max(0.0, total - less), calls - fewer)
        return DeviceTimes(left)

    def top(self, steps: int) -> list[dict[str, object]]:
        """The longest, per step: milliseconds and calls."""
        longest = sorted(self.by_kernel.items(), key=lambda item: -item[1][0])[:SHOWN]
        return [
            {"name": name[:NAME_LENGTH], "ms": total / steps, "calls": calls / steps}
            for name, (total, calls) in longest
        ]


def device_times(work: Callable[[], object]) -> DeviceTimes:
    """Runs `work` under the profiler. Kernels that overlap are counted twice."""
    if not torch.cuda.is_available():
        return DeviceTimes({})
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, int]] = {}
    for event in profiler.key_averages():
        if event.self_device_time_total > 0:
            found[event.key] = (event.self_device_time_total / 1e3, event.count)
    return DeviceTimes(found)
