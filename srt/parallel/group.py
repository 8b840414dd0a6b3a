"""What the processes that share a model do together. All of them call the same in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Group(Protocol):
    """The ranks 0 to size - 1 of one engine, on one machine."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, contiguous, of one shape; x itself holds it afterwards. The same bits
        on every rank. May be recorded in a CUDA graph."""
        ...

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, n] of every rank, side by side in the order of ranks: [S, size * n], the same bits on
        every rank. May be recorded in a CUDA graph."""
        ...

    def smallest(self, value: int) -> int:
        """The smallest of all ranks' values. Waits for them."""
        ...

    def share(self, data: bytes | None) -> bytes | None:
        """What rank 0 passed; what the others pass is not looked at. Waits for rank 0."""
        ...

    def close(self) -> None:
        """Leaves the group without waiting for the others, behind the last work of the device. Nothing
        that was recorded with it is left. Idempotent."""
        ...


class Alone:
    """The group of a process that has the whole model."""

    rank = 0
    size = 1

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def smallest(self, value: int) -> int:
        return value

    def share(self, data: bytes | None) -> bytes | None:
        return data

    def close(self) -> None:
        """Nobody to leave."""


ALONE = Alone()
