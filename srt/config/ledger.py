"""What a published configuration remembers: its trail, and who captured which leaf.

A component that reads a leaf while it is built keeps what it read, in a graph, a pool, a socket. A
later write would be seen by nobody, so it is refused and the message names the reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from srt.config.trail import TrailEntry


class Ledger:
    """Reads are noted under the innermost open scope and count once that component is built.

    Whoever is still being built may thus read a leaf, decide, and override it. A read outside any scope
    counts at once, under the reading module's name.
    """

    def __init__(self, trail: list[TrailEntry]) -> None:
        self.trail = trail
        self._open: list[tuple[str, set[str]]] = []
        self._readers: dict[str, str] = {}

    @property
    def is_building(self) -> bool:
        """Reads are attributed to a component now."""
        return bool(self._open)

    def note_read(self, field: str, module: str) -> None:
        """`field` ("bag.name") was read: by the component that is being built, else by `module`. The
        first reader is kept."""
        if self._open:
            self._open[-1][1].add(field)
        else:
            self._readers.setdefault(field, module)

    def reader_of(self, field: str) -> str | None:
        """The built component that holds the field's value, if there is one."""
        return self._readers.get(field)

    def forget_readers(self, field: str) -> None:
        """The field may be written again."""
        self._readers.pop(field, None)

    @contextmanager
    def building(self, component: str) -> Iterator[None]:
        """A component that fails to be built has captured nothing."""
        fields: set[str] = set()
        self._open.append((component, fields))
        try:
            yield
        except BaseException:
            self._open.pop()
            raise
        self._open.pop()
        for field in fields:
            self._readers.setdefault(field, component)
