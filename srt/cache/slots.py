"""Which rows of the runner's tables are free."""

from __future__ import annotations


class RowAllocator:
    """Rows 0 .. max_rows - 1, lowest first while none has been given back."""

    def __init__(self, max_rows: int) -> None:
        assert max_rows >= 1
        self.total = max_rows
        self._free = list(range(max_rows - 1, -1, -1))
        self._is_free = bytearray(b"\1" * max_rows)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        if not self._free:
            return None
        row = self._free.pop()
        self._is_free[row] = 0
        return row

    def free(self, row: int) -> None:
        assert not self._is_free[row], f"row {row} is free already"
        self._is_free[row] = 1
        self._free.append(row)

    def used_rows(self) -> set[int]:
        return {row for row in range(self.total) if not self._is_free[row]}
