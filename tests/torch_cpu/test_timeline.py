"""The stream of a GPU and what is recorded on it, with torch's part of it played."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch

from srt.runner.timeline import CudaTimeline, Pause

CUDA = torch.device("cuda", 0)


class Device:
    """What torch does of this: a pool may be shared for as long as one of its graphs is there."""

    def __init__(self) -> None:
        self.pools: dict[int, int] = {}  # how many graphs each has, once it has any
        self.said: list[str] = []
        self.error: Exception | None = None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        handles, device = count(1), self

        class Graph:
            def __init__(self) -> None:
                self.pool = 0

            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                assert device.pools.get(pool, 1) > 0, "a pool that lost its last graph"
                self.pool = pool
                device.pools[pool] = device.pools.get(pool, 0) + 1

            def capture_end(self) -> None:
                device.said.append("end")

            def replay(self) -> None:
                device.said.append("replay")

            def reset(self) -> None:
                if self.pool:
                    device.pools[self.pool] -= 1
                    self.pool = 0

            __del__ = reset

        class Event:
            def __init__(self, kind: str, enable_timing: bool) -> None:
                pass

            def record(self, stream: object) -> None:
                pass

            def synchronize(self) -> None:
                device.said.append("wait")
                if device.error is not None:
                    raise device.error

        class Stream:
            def __init__(self, device: torch.device) -> None:
                pass

            def synchronize(self) -> None:
                pass

        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "set_stream", lambda stream: None)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch, "Event", Event)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    made.install(monkeypatch)
    return made


def nothing() -> None:
    pass


def in_two_parts(pause: Pause) -> None:
    pause(nothing)


def test_a_pool_is_shared_until_its_last_graph_is_gone(device: Device) -> None:
    timeline = CudaTimeline(CUDA)
    plays: list[Callable[[], None]] = [timeline.capture(nothing), timeline.capture(nothing)]
    assert sorted(device.pools.values()) == [2]
    plays.pop()
    plays.append(timeline.capture_broken(in_two_parts))
    assert sorted(device.pools.values()) == [3]
    plays.clear()
    assert sorted(device.pools.values()) == [0]
    play = timeline.capture(nothing)
    assert sorted(device.pools.values()) == [0, 1]
    play()
    assert device.said[-1] == "replay"


@pytest.mark.parametrize("error", [None, RuntimeError("an illegal memory access")])
def test_what_is_forgotten_is_gone_whoever_holds_it(
    device: Device, error: Exception | None
) -> None:
    """A broken device has its say, and keeps no graph either."""
    timeline = CudaTimeline(CUDA)
    plays = [timeline.capture(nothing), timeline.capture_broken(in_two_parts)]
    device.error = error
    if error is None:
        timeline.forget()
    else:
        with pytest.raises(RuntimeError, match="illegal"):
            timeline.forget()
    assert device.said[-1] == "wait" and sorted(device.pools.values()) == [0]
    plays.append(timeline.capture(nothing))
    assert sorted(device.pools.values()) == [0, 1] and len(plays) == 3
