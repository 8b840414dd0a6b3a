"""What drawing must know of a row, as the device keeps it, and what comes back.

A table is [rows, COLUMNS] int64. Real numbers stand in it as the bits of a float64.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from kernels.sample.noise import seed_key

GENERATED = 0  # tokens generated so far: the position whose noise comes next
KEY = 1  # of the seed, see `kernels.sample.noise`
TOP_K = 2  # 0: off
TOP_P = 3  # real; 1: off
MIN_P = 4  # real; 0: off
INVERSE_TEMPERATURE = 5  # real; 0: greedy, and none of the three rules counts
COLUMNS = 6

HOTTEST = 1e30  # bound of 1 / temperature, so that zero times it is zero


def bits_of(value: float) -> int:
    """The float64, read as an int64."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def table_row(
    *, generated: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[int]:
    """One row of a table. `temperature` 0 is greedy."""
    inverse = min(1.0 / temperature, HOTTEST) if temperature > 0 else 0.0
    return [
        generated, seed_key(seed), top_k, bits_of(top_p), bits_of(min_p), bits_of(inverse),
    ]  # fmt: skip


def reals(table: torch.Tensor, column: int) -> torch.Tensor:
    """One column [R] of a table's rows [R, COLUMNS], as float64."""
    return table[:, column].contiguous().view(torch.float64)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn for N lines of logits, in one piece of `memory`, [2 N] int64, so that one copy
    fetches it. It may lie on either side."""

    memory: torch.Tensor

    @staticmethod
    def empty(num: int, device: torch.device) -> Drawn:
        return Drawn(torch.empty(2 * num, dtype=torch.int64, device=device))

    def __len__(self) -> int:
        return len(self.memory) // 2

    @property
    def tokens(self) -> torch.Tensor:
        """[N] int64; 0 where the line's largest logit is not a finite number."""
        return self.memory[: len(self)]

    @property
    def peaks(self) -> torch.Tensor:
        """[N] float32, each line's largest logit; NaN if there is a NaN."""
        return self.memory.view(torch.float32)[2 * len(self) : 3 * len(self)]

    @property
    def floors(self) -> torch.Tensor:
        """[N] float32, the least logit a token can have had; minus infinity if no rule cuts."""
        return self.memory.view(torch.float32)[3 * len(self) :]
