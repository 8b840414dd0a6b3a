"""Attention by FlashInfer's wrappers: long slices by its prefill (FA3 on Hopper), decodes by its
tensor-core decode. No windows, caps or trees: the capability table says so.

A wrapper's plan wants what only `forward` knows (heads, scale), so it is made in the first forward after
`plan`. A plan leaves by an asynchronous copy out of pinned memory of the wrapper, so a wrapper plans
again only after the copy of its last plan is through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool

WORKSPACE_BYTES = 256 << 20
HOPPER = (9, 0)
Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan depends on beside the batch."""

    heads: int
    num_kv: int
    dim: int
    page_size: int
    scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(slots=True)
class Pages:
    """The rows' pages in FlashInfer's form. indptr [S + 1], last_len [S]: int32 on the host; indices:
    int32 on the device."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_len: torch.Tensor


class Planned:
    """A wrapper and what it was last planned for."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.shape: Shape | None = None
        self._copied: torch.Event | None = None

    def wait(self) -> None:
        """Until the pinned memory may be written again."""
        if self._copied is not None:
            self._copied.synchronize()

    def sent(self) -> None:
        self._copied = torch.Event("cuda")
        self._copied.record()


class FlashInferAttention:
    """Eager steps take turns on two wrappers of each kind; each recorded batch size has its own."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None
        self._prefills: list[Planned] = []
        self._decodes: list[Planned] = []
        self._recorded: dict[int, Planned] = {}
        self._batch: AttentionBatch | None = None
        self._recording = False
        self._prefill: Planned | None = None  # of this step, once planned
        self._decode: Planned | None = None

    def plan(self, batch: AttentionBatch) -> None:
        self._open(batch.page_table.device)
        self._batch, self._recording = batch, False
        self._prefill = self._decode = None

    def capture(self, batch: AttentionBatch) -> None:
        """The first forward from here on plans, so it must run before the recording begins."""
        self._open(batch.page_table.device)
        self._batch, self._recording = batch, True
        self._prefill = None
        size = len(batch.rows_host)
        if size not in self._recorded:
            self._recorded[size] = Planned(self._new_decode(batch, size))
        self._decode = self._recorded[size]

    def replay(self, batch: AttentionBatch) -> None:
        planned = self._recorded[len(batch.rows_host)]
        assert planned.shape is not None, "replay before the graph was recorded"
        _plan_decode(planned, planned.shape, batch)

    def forward(
        self,
        q: torch.Tensor,
        layer: int,
        pool: KVPool,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "forward before plan"
        assert window is None and cap is None and batch.bases is None, (
            "the capability table says so"
        )
        planes = tuple(
            plane.view(-1, batch.page_size, *plane.shape[1:])
            for plane in (pool.keys(layer), pool.values(layer))
        )
        shape = Shape(
            heads=q.shape[1],
            num_kv=planes[0].shape[2],
            dim=q.shape[2],
            page_size=batch.page_size,
            scale=scale * pool.k_scale(layer),
            dtype=q.dtype,
            kv_dtype=planes[0].dtype,
        )
        self._prepare(batch, shape)
        count = batch.num_decode
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        v_scale = pool.v_scale(layer)
        for planned, tokens in (
            (self._decode, slice(0, count)),
            (self._prefill, slice(count, None)),
        ):
            if planned is not None:
                planned.wrapper.run(q[tokens], planes, out=out[tokens])
        return out if v_scale == 1 else out.mul_(v_scale)

    def _prepare(self, batch: AttentionBatch, shape: Shape) -> None:
        count = batch.num_decode
        if self._recording:
            assert self._decode is not None
            if self._decode.shape != shape:
                _plan_decode(self._decode, shape, batch)
            return
        if count and (self._decode is None or self._decode.shape != shape):
            self._decodes.reverse()
            self._decode = self._decodes[0]
            _plan_decode(self._decode, shape, batch)
        if len(batch.rows_host) > count and (self._prefill is None or self._prefill.shape != shape):
            self._prefills.reverse()
            self._prefill = self._prefills[0]
            _plan_prefill(self._prefill, shape, batch)

    def _open(self, device: torch.device) -> None:
        if self._workspace is not None:
            return
        from flashinfer import (
            BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithPagedKVCacheWrapper,
        )

        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        kernel = "fa3" if torch.cuda.get_device_capability(device) == HOPPER else "fa2"
        self._prefills = [
            Planned(BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=kernel))
            for _ in range(2)
        ]
        self._decodes = [
            Planned(
                BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True)
            )
            for _ in range(2)
        ]

    def _new_decode(self, batch: AttentionBatch, size: int) -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=batch.page_table.device)

        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=ints(size + 1),
            paged_kv_indices_buffer=ints(size * batch.page_table.shape[1]),
            paged_kv_last_page_len_buffer=ints(size),
        )


def _plan_decode(planned: Planned, shape: Shape, batch: AttentionBatch) -> None:
    count = batch.num_decode
    starts = np.array(batch.starts_host[:count], dtype=np.int32)
    pages = _list_pages(batch, slice(0, count), starts + 1)
    planned.wait()
    planned.wrapper.plan(
        pages.indptr,
        pages.indices,
        pages.last_len,
        shape.heads,
        shape.num_kv,
        shape.dim,
        shape.page_size,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
        sm_scale=shape.scale,
    )
    planned.shape = shape
    planned.sent()


def _plan_prefill(planned: Planned, shape: Shape, batch: AttentionBatch) -> None:
    rest = slice(batch.num_decode, None)
    lengths = np.array(batch.lengths_host[rest], dtype=np.int32)
    ends = np.array(batch.starts_host[rest], dtype=np.int32) + lengths
    pages = _list_pages(batch, rest, ends)
    planned.wait()
    planned.wrapper.plan(
        torch.from_numpy(_running(lengths)),
        pages.indptr,
        pages.indices,
        pages.last_len,
        shape.heads,
        shape.num_kv,
        shape.dim,
        shape.page_size,
        causal=True,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
        sm_scale=shape.scale,
    )
    planned.shape = shape
    planned.sent()


def _list_pages(batch: AttentionBatch, pieces: slice, ends: Ints) -> Pages:
    """`ends` [S]: how many tokens of each row are read. The ids are gathered on the device."""
    table = batch.page_table
    counts = (ends + batch.page_size - 1) // batch.page_size
    indptr = _running(counts)
    rows = np.array(batch.rows_host[pieces], dtype=np.int64)
    places = np.repeat(rows * table.stride(0) - indptr[:-1], counts) + np.arange(indptr[-1])
    at = torch.from_numpy(places).to(table.device, non_blocking=True)
    last = ends - (counts - 1) * batch.page_size
    return Pages(
        indptr=torch.from_numpy(indptr),
        indices=table.view(-1)[at],
        last_len=torch.from_numpy(last.astype(np.int32)),
    )


def _running(counts: Ints) -> Ints:
    """[0, then the sums so far]."""
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
