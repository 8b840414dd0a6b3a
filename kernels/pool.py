"""The threads that the native kernels share; pool.c says how they work."""

from __future__ import annotations

import ctypes
import weakref

POINTER, INT = ctypes.c_void_p, ctypes.c_int64


class Pool:
    """`threads` in all: the calling one and the workers. Its memory lives as long as this object, which
    whoever passes `pointer` on must keep.

    One call at a time has the workers; a call beside it, or after `close`, or in the child after a fork,
    does its work alone. Results are the same.
    """

    def __init__(self, functions: ctypes.CDLL, threads: int) -> None:
        """Raises ValueError for fewer than one thread and MemoryError."""
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        create, self._stop, free = (
            functions[f"pool_{name}"] for name in ("create", "stop", "free")
        )
        create.argtypes, create.restype = [INT], POINTER
        for function in (self._stop, free):
            function.argtypes, function.restype = [POINTER], None
        self._count = functions["pool_threads"]
        self._count.argtypes, self._count.restype = [POINTER], INT
        pointer = create(threads)
        if pointer is None:
            raise MemoryError(f"no memory for a pool of {threads} threads")
        self.pointer: int = pointer
        # Not at exit: the process takes its threads with it, and a job may still be running.
        weakref.finalize(self, free, pointer).atexit = False

    @property
    def threads(self) -> int:
        return int(self._count(self.pointer))

    def close(self) -> None:
        """Ends the workers and waits for that. No job may be running. Again: no effect."""
        self._stop(self.pointer)
