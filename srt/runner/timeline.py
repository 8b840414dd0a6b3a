"""When work on a device is done. The same words for a GPU, which works on behind the host's back, and
for a CPU, where work is done when the call returns."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the device's work."""

    def is_reached(self) -> bool: ...

    def wait(self) -> None:
        """Blocks until the device is past it. Raises what the device reports of work before it."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Device time between two marks that are both reached."""
        ...


class Timeline(Protocol):
    """One device's order of work. All work of a runner goes to it, so that it runs in launch order."""

    is_async: bool

    def mark(self) -> Mark:
        """Behind all that was launched so far."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs `work` once, then records it; what comes back does it again, on the same memory. `work`
        may not look at a value on the device nor wait for it."""
        ...


class HostMark:
    """Reached when it is made."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = perf_counter()

    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return self._at - earlier._at


class HostTimeline:
    """A CPU. A captured piece of work is simply done again."""

    is_async = False

    def mark(self) -> HostMark:
        return HostMark()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


class CudaMark:
    """A CUDA event."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def is_reached(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return earlier.event.elapsed_time(self.event) / 1e3


class CudaTimeline:
    """A stream of its own, current from now on in the thread that makes it: work cannot be recorded on
    the default stream. Recorded work shares one memory pool: it never runs side by side."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self.stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(self.stream)
        self._pool = torch.cuda.graph_pool_handle()

    def mark(self) -> CudaMark:
        return CudaMark(self.stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # compiles, loads modules and grows workspaces, none of which can be recorded
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph.replay


def open_timeline(device: torch.device) -> Timeline:
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()
