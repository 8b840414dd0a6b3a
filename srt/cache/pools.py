"""KV pools: the tensors behind the pages. Who owns which page is decided elsewhere, without tensors."""

from __future__ import annotations

import math

import torch

from kernels.arena import map_chunk


class PagedKVPool:
    """One K and one V plane per layer, each [num_pages * page_size, kv_heads, head_dim].

    Everything lies in one allocation, see `make_planes`.
    Page 0 stays zero as long as nobody writes to it; gathers use it as padding.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: list[tuple[float, float]] | None = None,
    ) -> None:
        """`scales`: each layer's k_scale and v_scale; None: all are 1."""
        assert scales is None or len(scales) == num_layers
        self._scales = scales or [(1.0, 1.0)] * num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = num_layers
        self.dtype = dtype
        shape = (2 * num_layers, num_pages * page_size, num_kv_heads, head_dim)
        self._planes = list(make_planes(shape, dtype, device).unbind(0))
        self.bytes_per_token = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def keys(self, layer: int) -> torch.Tensor:
        """The K plane of `layer`; a view, written in place."""
        return self._planes[2 * layer]

    def values(self, layer: int) -> torch.Tensor:
        """The V plane of `layer`; a view, written in place."""
        return self._planes[2 * layer + 1]

    def k_scale(self, layer: int) -> float:
        """K = what the plane holds * k_scale."""
        return self._scales[layer][0]

    def v_scale(self, layer: int) -> float:
        """V = what the plane holds * v_scale."""
        return self._scales[layer][1]

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies K and V of the slots `sources` [N] int64 into the slots `destinations` [N] int64, in
        every layer; the two may overlap."""
        for plane in self._planes:
            plane[destinations] = plane[sources]


class LatentPool:
    """One plane per layer, [num_pages * page_size, 1, rank + rope]: what a token of an MLA model leaves
    there is its latent and its rotated key, for all heads. (rank + rope) * bytes of the type per token
    and layer: 1,152 bytes in bfloat16 where these are 512 and 64, whatever the number of heads.

    `keys` gives the plane, `values` the latents in it. A pool like any other for whoever moves slots.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_layers: int,
        rank: int,
        rope: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_layers = num_layers
        self.dtype = dtype
        self._rank = rank
        shape = (num_layers, num_pages * page_size, 1, rank + rope)
        self._planes = list(make_planes(shape, dtype, device).unbind(0))
        self.bytes_per_token = num_layers * (rank + rope) * dtype.itemsize

    def keys(self, layer: int) -> torch.Tensor:
        """The plane of `layer`; a view, written in place."""
        return self._planes[layer]

    def values(self, layer: int) -> torch.Tensor:
        """The latents in the plane of `layer`, [num_slots, 1, rank]; a view."""
        return self._planes[layer][:, :, : self._rank]

    def k_scale(self, layer: int) -> float:
        return 1.0

    def v_scale(self, layer: int) -> float:
        return 1.0

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies the slots `sources` [N] int64 into the slots `destinations` [N] int64, in every layer;
        the two may overlap."""
        for plane in self._planes:
            plane[destinations] = plane[sources]


def make_planes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One zeroed allocation, on a CPU in huge pages: a decode step reads a little of everything, and
    pays for every address translation."""
    if device.type == "cpu":
        return map_chunk(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
