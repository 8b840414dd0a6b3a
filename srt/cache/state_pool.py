"""A KV pool of layers whose heads differ, that also keeps what short convolutions remember."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from srt.cache.pools import make_planes


class StatePool:
    """K and V planes [num_pages * page_size, kv_heads, head_dim] for each layer, whose heads may differ;
    and in float32 the memory [num_pages * depth, width] of each layer, see `srt.layers.convolution`."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        heads: Sequence[tuple[int, int]],
        widths: Sequence[int],
        depth: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`heads`: of each layer, KV heads and their size. `widths`: numbers that a token leaves in each
        layer's memory; `depth`: tokens of a page that do."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = len(heads)
        self.dtype = dtype
        slots = num_pages * page_size
        self._planes = [
            (make_planes((slots, *each), dtype, device), make_planes((slots, *each), dtype, device))
            for each in heads
        ]
        self._memory = [
            make_planes((num_pages * depth, width), torch.float32, device) for width in widths
        ]
        per_page = sum(each.nbytes for each in self._memory) // num_pages
        items = 2 * sum(math.prod(each) for each in heads)
        self.bytes_per_token = items * dtype.itemsize + -(-per_page // page_size)

    def keys(self, layer: int) -> torch.Tensor:
        return self._planes[layer][0]

    def values(self, layer: int) -> torch.Tensor:
        return self._planes[layer][1]

    def memory(self, layer: int) -> torch.Tensor:
        """[num_pages * depth, width] float32, written in place."""
        return self._memory[layer]

    def k_scale(self, layer: int) -> float:
        return 1.0

    def v_scale(self, layer: int) -> float:
        return 1.0

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Nobody moves slots here: guesses, whose trees need it, are refused for such models."""
        raise AssertionError(
            "what convolutions remember is kept by page, and cannot be moved by slot"
        )
