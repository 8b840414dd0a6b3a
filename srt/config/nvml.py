"""The driver's own view of its GPUs, through NVML: no torch, and no CUDA context is made.

NVML counts the cards in the order of their PCI addresses, as CUDA does when CUDA_DEVICE_ORDER says
PCI_BUS_ID. Function names and numbers are those of NVIDIA's `nvml.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
ERRORS = {
    4: "this user may not ask the NVIDIA driver",
    9: "the NVIDIA driver is not loaded",
    15: "a GPU has fallen off the bus; the machine must be restarted",
    18: "the NVIDIA driver and its library differ in version; restart the machine or the container",
}
_TEXT_BYTES = 96


class NvmlError(Exception):
    """A call failed; the message says what that means."""


class Memory(ctypes.Structure):
    """nvmlMemory_t: bytes of the whole card."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Nvml:
    """One opened library. `close` ends it."""

    def __init__(self, open_library: Callable[[str], Any] = ctypes.CDLL) -> None:
        """Raises NvmlError if there is no driver to ask."""
        try:
            self._library = open_library(LIBRARY)
        except OSError:
            raise NvmlError(f"there is no NVIDIA driver ({LIBRARY} is not installed)") from None
        self._call("nvmlInit_v2")

    def close(self) -> None:
        self._call("nvmlShutdown")

    def driver_version(self) -> str:
        """E.g. "580.65.06"."""
        return self._text("nvmlSystemGetDriverVersion")

    def handles(self) -> list[ctypes.c_void_p]:
        """One for each card, in the order of their PCI addresses."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            found.append(handle)
        return found

    def name(self, handle: ctypes.c_void_p) -> str:
        return self._text("nvmlDeviceGetName", handle)

    def uuid(self, handle: ctypes.c_void_p) -> str:
        """E.g. "GPU-8a56a4bc-..."."""
        return self._text("nvmlDeviceGetUUID", handle)

    def capability(self, handle: ctypes.c_void_p) -> int:
        """Major and minor as one number: 90 for sm_90."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call(
            "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor)
        )
        return 10 * major.value + minor.value

    def memory(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        """(total, free), bytes."""
        memory = Memory()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory.total, memory.free

    def _text(self, function: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(function, *arguments, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode(errors="replace")

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            code = self._library[function](*arguments)
        except AttributeError:
            raise NvmlError(f"the NVIDIA driver is too old: it has no {function}") from None
        if code != 0:
            raise NvmlError(ERRORS.get(code, f"{function} of the NVIDIA driver failed ({code})"))
