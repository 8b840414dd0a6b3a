"""Attention by our Triton kernel, for slices of every kind: decodes in one launch, others in a second.

Nothing of a decode step is planned on the host, so a recorded step needs no preparation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.launch import shared_memory
from kernels.paged_attention.tiles import cut_tiles
from kernels.paged_attention.triton import (
    PAIRED_ROWS,
    SHORT_ROWS,
    Attention,
    TileShape,
    Work,
    choose_shape,
    choose_splits,
    early_shape,
    fixed_shape,
    paired_shape,
    tall_shape,
)
from kernels.transfer import pin, send
from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool

EARLY_PROGRAMS = 32  # tiles * KV heads up to which a decode step is bound by latency
EARLY_ROWS = 16
TALL_PROGRAMS = 528  # tiles * KV heads up to which tiles are tall
PAIRED_PROGRAMS = 264  # the same for more keys at once from a cache of 8 bits
LEAST_ORDERED = 48  # slices whose tiles do not all run at once


@dataclass(frozen=True, slots=True)
class Heads:
    """What the tiles depend on beside the batch; alike in all layers of most models."""

    group: int  # query heads of a KV head
    num_kv: int
    dim: int
    narrow: bool  # 8 bits in the cache


class Order:
    """The turn of a recorded step's slices: those with most keys first, so that what runs last is short.

    It holds for as long as the rows are the same, for all grow alike."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.arange(size, dtype=torch.int32, device=device)
        self._rows: list[int] = []

    def follow(self, batch: AttentionBatch) -> None:
        if batch.rows_host == self._rows:
            return
        self._rows = list(batch.rows_host)
        turns = np.argsort(-np.array(batch.starts_host), kind="stable").astype(np.int32)
        self.tensor.copy_(pin(turns, self.tensor.device), non_blocking=True)


class TritonAttention:
    """`deterministic`: one tile shape for everything and no tile's keys split, so that a token's bits
    depend on its own row only."""

    name = "triton"
    wants_new = False

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self._attention: Attention | None = None
        self._batch: AttentionBatch | None = None
        self._works: dict[Heads, list[Work]] = {}
        self._is_recorded = False
        self._orders: dict[int, Order] = {}

    def plan(self, batch: AttentionBatch) -> None:
        if self._attention is None:
            self._attention = Attention(batch.page_table.device)
        self._batch = batch
        self._works = {}
        self._is_recorded = False

    def capture(self, batch: AttentionBatch) -> None:
        self.plan(batch)
        self._is_recorded = True
        size = len(batch.rows_host)
        if size >= LEAST_ORDERED and size not in self._orders:
            self._orders[size] = Order(size, batch.page_table.device)

    def replay(self, batch: AttentionBatch) -> None:
        """The kernel reads all it needs from the static tensors; what can be better is the order."""
        order = self._orders.get(len(batch.rows_host))
        if order is not None:
            order.follow(batch)

    def forward(
        self,
        q: torch.Tensor,
        layer: int,
        pool: KVPool,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        attention, batch = self._attention, self._batch
        assert attention is not None and batch is not None, "forward before plan"
        k_plane = pool.keys(layer)
        num_kv, dim = k_plane.shape[1:]
        heads = Heads(q.shape[1] // num_kv, num_kv, dim, k_plane.dtype.itemsize == 1)
        works = self._works.get(heads)
        if works is None:
            works = self._works[heads] = self._cut(batch, heads)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for work in works:
            attention.run(
                work,
                q,
                k_plane,
                pool.values(layer),
                out,
                scale=scale * pool.k_scale(layer),
                window=window,
                cap=cap,
                v_scale=pool.v_scale(layer),
            )
        return out

    def _cut(self, batch: AttentionBatch, heads: Heads) -> list[Work]:
        if self._is_recorded:
            return [self._alike(batch, len(batch.rows_host), batch.lengths_host[0], heads)]
        count = batch.num_decode
        if any(base >= 0 for base in batch.bases_host[:count]):
            count = 0  # a decode slice that is no chain is cut like the others
        works = [self._alike(batch, count, 1, heads)] if count else []
        lengths = batch.lengths_host[count:]
        if lengths:
            shape = self._shape(max(lengths), heads)
            cut = cut_tiles(
                batch.rows_host[count:],
                batch.starts_host[count:],
                lengths,
                batch.bases_host[count:],
                per_tile=shape.per_tile(heads.group),
                first_token=count,
            )
            tiles = send(cut, batch.page_table.device)
            works.append(
                Work(
                    num=len(tiles),
                    shape=shape,
                    splits=self._splits(len(tiles), shape, heads, batch),
                    page_table=batch.page_table,
                    page_size=batch.page_size,
                    tiles=tiles,
                    visible=batch.visible,
                    positions=batch.positions,
                )
            )
        return works

    def _alike(self, batch: AttentionBatch, count: int, length: int, heads: Heads) -> Work:
        """The first `count` slices, chains of one length, by the batch's own tensors."""
        shape = self._shape(length, heads)
        if length * heads.group <= SHORT_ROWS and heads.dim <= 128 and not self._deterministic:
            programs = count * heads.num_kv
            is_alone = length == 1 and heads.group <= EARLY_ROWS
            if batch.is_settled and is_alone and programs <= EARLY_PROGRAMS:
                shape = early_shape()
            elif heads.narrow:
                if shape.rows <= PAIRED_ROWS and programs <= PAIRED_PROGRAMS:
                    room = shared_memory(batch.page_table.device)
                    shape = paired_shape(shape, heads.dim, room)
            elif programs <= TALL_PROGRAMS:
                shape = tall_shape()
        num = count * -(-length // shape.per_tile(heads.group))
        return Work(
            num=num,
            shape=shape,
            splits=self._splits(num, shape, heads, batch),
            page_table=batch.page_table,
            page_size=batch.page_size,
            rows=batch.rows,
            starts=batch.starts,
            length=length,
            order=self._orders[count].tensor
            if self._is_recorded and count in self._orders
            else None,
        )

    def _shape(self, longest: int, heads: Heads) -> TileShape:
        if self._deterministic:
            return fixed_shape(heads.dim, heads.group)
        rows = longest * heads.group
        return choose_shape(rows, heads.dim, heads.group, narrow=heads.narrow)

    def _splits(self, tiles: int, shape: TileShape, heads: Heads, batch: AttentionBatch) -> int:
        if self._deterministic:
            return 1
        return choose_splits(tiles * heads.num_kv, shape, batch.page_table.device)
