"""The driver's context of a GPU, opened while Python imports torch: both take their time, and only one
of them needs the interpreter. Function names are those of NVIDIA's `cuda.h`."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

LIBRARY = "libcuda.so.1"


def open_early(ordinal: int, open_library: Callable[[str], Any] = ctypes.CDLL) -> threading.Thread:
    """Begins to open the context that torch will use of the visible GPU `ordinal`, for as long as this
    process lives. Whoever needs it sooner waits in the driver; if it fails, torch fails after it and
    says why."""
    thread = threading.Thread(
        target=_open, args=(ordinal, open_library), daemon=True, name="early-context"
    )
    thread.start()
    return thread


def _open(ordinal: int, open_library: Callable[[str], Any]) -> None:
    try:
        driver = open_library(LIBRARY)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
