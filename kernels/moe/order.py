"""Launches what brings the entries of every expert together."""

from __future__ import annotations

import torch

from kernels.launch import Launcher, next_power_of_two
from kernels.moe.sort import count_entries, sort_entries, sort_few_entries

FEW = {512: 4, 2048: 8}  # entries that every program looks at, by how many warps
MANY = {65536: 256, 2**31: 512}  # entries of a program, which all look at what all have counted
WARPS = 8
SEEN = 16384  # counts at once: as many as the registers of so many warps hold


class Sorter:
    def __init__(self) -> None:
        self._few = Launcher(sort_few_entries)
        self._count, self._many = Launcher(count_entries), Launcher(sort_entries)

    def __call__(
        self, experts: torch.Tensor, tile: int, first: int, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """sorted and blocks, as in `kernels.moe.sort`, of experts: int32 [T, k], T not 0."""
        entries = experts.numel()
        num_blocks = entries // tile + num_experts
        order, blocks = experts.new_empty(entries), experts.new_empty((num_blocks, 4))
        width = next_power_of_two(num_experts)
        sizes = (entries, num_blocks, first)
        for chunk, warps in FEW.items():
            if entries <= chunk:
                grid, constants = (num_experts, 1, 1), (tile, chunk, width)
                self._few(grid, (experts, order, blocks), sizes, constants, num_warps=warps)
                return order, blocks
        chunk = next(chunk for most, chunk in MANY.items() if entries <= most)
        grid = (-(-entries // chunk), 1, 1)
        counts = experts.new_empty((grid[0], width))
        numbers = (entries, first, num_experts)
        self._count(grid, (experts, counts), numbers, (chunk, width), num_warps=WARPS)
        seen = max(1, SEEN // width)
        tensors, shape = (experts, counts, order, blocks), (tile, chunk, width, seen)
        self._many(grid, tensors, (*sizes, num_experts), shape, num_warps=WARPS)
        return order, blocks
