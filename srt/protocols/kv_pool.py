"""A KV pool: storage for pages, one K and one V plane per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class KVPool(Protocol):
    """Slot s of page p is row `p * page_size + s`. Planes are [num_pages * page_size, kv_heads,
    head_dim] in the pool's dtype. Page 0 is padding: written by padded tokens, read by nobody.

    A pool of latents has one head as wide as a latent and a rotated key, and its values are the latents
    in its keys."""

    page_size: int
    num_pages: int
    num_layers: int
    dtype: torch.dtype

    def keys(self, layer: int) -> torch.Tensor:
        """The K plane itself, not a copy: writes are seen by everybody."""
        ...

    def values(self, layer: int) -> torch.Tensor:
        """The V plane itself."""
        ...

    def k_scale(self, layer: int) -> float:
        """What K's stored numbers are multiplied with to get K; 1 unless the dtype is a narrow one."""
        ...

    def v_scale(self, layer: int) -> float:
        """The same for V."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """K and V over all layers."""
        ...

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies what is in the slots `sources` [N] int64 into the slots `destinations` [N] int64, in
        every layer; the two may overlap."""
        ...
