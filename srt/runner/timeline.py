"""When work on a device is done. The same words for a GPU, which works on behind the host's back, and
for a CPU, where work is done when the call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol
from weakref import WeakSet

import torch

Pause = Callable[[Callable[[], None]], None]


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

    def join(self) -> None:
        """From now on the work of the calling thread goes there too."""
        ...

    def mark(self) -> Mark:
        """Behind all that was launched so far."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs `work` once, then records it; what comes back does it again, on the same memory. `work`
        may not look at a value on the device nor wait for it."""
        ...

    def capture_broken(self, work: Callable[[Pause], None]) -> Callable[[], None]:
        """The same for work with parts that cannot be recorded: it hands each of them to the `Pause`
        it is given, which does it then and there, and again whenever the work is played."""
        ...

    def forget(self) -> None:
        """Waits for the device, then gives up all that was captured, whoever still holds it: none of it
        is played again. Raises what the device reports."""
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

    def join(self) -> None:
        """A CPU has no other."""

    def mark(self) -> HostMark:
        return HostMark()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    def capture_broken(self, work: Callable[[Pause], None]) -> Callable[[], None]:
        work(_at_once)
        return lambda: work(_at_once)

    def forget(self) -> None:
        """Nothing is held."""


class CudaMark:
    """A CUDA event."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.Event("cuda", enable_timing=True)
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
    the default stream. Recorded work shares one memory pool: it never runs side by side. A pool whose
    graphs are all gone takes no others, so the next one gets a new pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.set_device(device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool = torch.cuda.graph_pool_handle()
        self.join()

    def join(self) -> None:
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self.stream)

    def mark(self) -> CudaMark:
        return CudaMark(self.stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return self.capture_broken(lambda pause: work())

    def capture_broken(self, work: Callable[[Pause], None]) -> Callable[[], None]:
        work(_at_once)  # compiles, loads modules and grows workspaces: nothing to be recorded
        self.stream.synchronize()
        parts: list[Callable[[], None]] = []
        graph = self._begin()

        def pause(step: Callable[[], None]) -> None:
            nonlocal graph
            graph.capture_end()
            parts.append(graph.replay)
            step()
            parts.append(step)
            graph = self._begin()

        try:
            work(pause)
        finally:
            graph.capture_end()
        parts.append(graph.replay)
        return parts[0] if len(parts) == 1 else partial(_play, tuple(parts))

    def _begin(self) -> torch.cuda.CUDAGraph:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.add(graph)
        return graph

    def forget(self) -> None:
        try:
            self.mark().wait()
        finally:
            for graph in list(self._graphs):
                graph.reset()
            self._graphs.clear()


def _at_once(step: Callable[[], None]) -> None:
    step()


def _play(parts: Sequence[Callable[[], None]]) -> None:
    for part in parts:
        part()


def open_timeline(device: torch.device) -> Timeline:
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()
