"""From a batch's geometry to a plan of a FlashInfer wrapper: all numbers on the host, page ids gathered
on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from kernels.transfer import pin, send
from srt.protocols.attention import AttentionBatch

KeysForm = Literal["paged", "ragged"]  # in the planes' pages, or side by side
Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a plan depends on beside the batch. `rope`: of MLA, the numbers behind `dim` that the scores
    see."""

    heads: int
    num_kv: int
    dim: int
    page_size: int
    scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype
    rope: int = 0


class Planned:
    """A wrapper and what it was last planned for."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.shape: Shape | None = None
        self._copied: torch.Event | None = None

    def plan(self, shape: Shape, *arguments: object, **options: object) -> None:
        """Waits until the wrapper's pinned memory may be written again."""
        if self._copied is not None:
            self._copied.synchronize()
        self.wrapper.plan(
            *arguments,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
            sm_scale=shape.scale,
            **options,
        )
        self.shape = shape
        self._copied = torch.Event("cuda")
        self._copied.record()


def plan_decode(planned: Planned, shape: Shape, batch: AttentionBatch) -> None:
    pieces = slice(0, batch.num_decode)
    ends = np.array(batch.starts_host[pieces], dtype=np.int32) + 1
    heads = (shape.heads, shape.num_kv, shape.dim)
    planned.plan(shape, *list_pages(batch, pieces, ends), *heads, shape.page_size)


def plan_prefill(planned: Planned, shape: Shape, batch: AttentionBatch, form: KeysForm) -> Ints:
    """Plans all slices that are no decodes. Returns how many keys each has, [S] int32."""
    pieces = slice(batch.num_decode, None)
    lengths = np.array(batch.lengths_host[pieces], dtype=np.int32)
    ends = np.array(batch.starts_host[pieces], dtype=np.int32) + lengths
    device = batch.page_table.device
    queries = pin(running(lengths), device)
    heads = (shape.heads, shape.num_kv, shape.dim)
    if form == "paged":
        pages = list_pages(batch, pieces, ends)
        planned.plan(shape, queries, *pages, *heads, shape.page_size, causal=True)
    else:
        planned.plan(shape, queries, pin(running(ends), device), *heads, causal=True)
    return ends


def list_pages(
    batch: AttentionBatch, pieces: slice, ends: Ints
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ends` [S]: how many tokens of each row are read. Returns [S + 1] int32, where each row's pages
    begin; their ids, int32 on the device; [S] int32, the tokens of the last page."""
    counts = (ends + batch.page_size - 1) // batch.page_size
    last = ends - (counts - 1) * batch.page_size
    indices = _look_up(batch, pieces, counts, per_entry=1)
    device = batch.page_table.device
    return pin(running(counts), device), indices, pin(last, device)


def list_slots(batch: AttentionBatch, pieces: slice, ends: Ints) -> torch.Tensor:
    """The slots of the rows' first `ends` tokens, one row after the other, [sum] int64 on the device."""
    size = batch.page_size
    pages = _look_up(batch, pieces, ends, per_entry=size).long()
    offsets = np.arange(int(ends.sum())) - np.repeat(np.cumsum(ends) - ends, ends)
    return pages * size + send(offsets % size, pages.device)


def _look_up(batch: AttentionBatch, pieces: slice, counts: Ints, *, per_entry: int) -> torch.Tensor:
    """Entries 0, 1 .. of each row's table, each repeated `per_entry` times, `counts` of them in all."""
    table = batch.page_table
    rows = np.array(batch.rows_host[pieces], dtype=np.int64)
    begin = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum())) - np.repeat(begin, counts)
    places = np.repeat(rows * table.stride(0), counts) + within // per_entry
    return table.view(-1)[send(places, table.device)]


def running(counts: Ints) -> Ints:
    """[0, then the sums so far]."""
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
