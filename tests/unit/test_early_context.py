"""The context of the GPU that torch will use, opened before torch asks for it."""

from __future__ import annotations

import ctypes
from typing import Any

from srt.launch.early_context import open_early


class Driver:
    """Notes what it is asked for; `broken` fails."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.calls: list[tuple[object, ...]] = []

    def _did(self, name: str, *words: object) -> int:
        self.calls.append((name, *words))
        return 100 if name == self.broken else 0

    def cuInit(self, flags: int) -> int:
        return self._did("init", flags)

    def cuDeviceGet(self, place: Any, ordinal: int) -> int:
        ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = 7
        return self._did("device", ordinal)

    def cuDevicePrimaryCtxRetain(self, place: Any, device: ctypes.c_int) -> int:
        return self._did("retain", device.value)


def test_the_context_of_the_ranks_own_gpu_is_kept() -> None:
    driver = Driver()
    open_early(1, lambda name: driver).join(10)
    assert driver.calls == [("init", 0), ("device", 1), ("retain", 7)]


def test_a_driver_that_fails_is_left_to_torch() -> None:
    for broken, calls in (("init", 1), ("device", 2), ("retain", 3)):
        driver = Driver(broken)
        open_early(0, lambda name, driver=driver: driver).join(10)
        assert len(driver.calls) == calls


def test_without_a_driver_nothing_happens() -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    thread = open_early(0, missing)
    thread.join(10)
    assert not thread.is_alive()
