"""An attention backend for MLA: which form each part of a batch takes, whoever computes it.

Queries are [T, heads, nope + rope], what comes back is [T, heads, value]; the step's latents are in the
pool. Decodes are absorbed. Other slices are absorbed or expanded, see `mla_plan`; expanded in chunks
means

    out, lse = the new tokens among themselves, causally
    for each chunk of the prefixes: gather its latents, make K and V of them,
                                    attend to all of it, merge by lse

so that what is expanded at once is bounded however long a prefix is. Where a chunk's queries are too few
to fill the device, they stand beside each other several times, each time before a part of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from kernels.merge_state import MergeState
from kernels.transfer import send
from srt.attention.mla_plan import (
    Chunk,
    Form,
    MlaSettings,
    choose_form,
    count_parts,
    cut_keys,
    cut_prefixes,
)
from srt.layers.latent import UpProjection
from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class Spans:
    """Slices side by side: queries[i] queries against keys[i] keys each. `causal`: the last query sees
    the last key, those before it one less each; else every query sees every key."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool


class MlaCore(Protocol):
    """What computes. Results are [n, heads, ...] contiguous."""

    name: str

    def start(self) -> None:
        """A step begins."""
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Slices that will be absorbed in this step."""
        ...

    def capture(self, batch: AttentionBatch) -> None: ...

    def replay(self, batch: AttentionBatch) -> None: ...

    def absorbed(
        self, q: torch.Tensor, layer: int, pool: KVPool, up: UpProjection, scale: float
    ) -> torch.Tensor:
        """Of all tokens that are planned: q [n, heads, nope + rope] -> [n, heads, value]."""
        ...

    def attend(
        self, q: torch.Tensor, latents: torch.Tensor, up: UpProjection, spans: Spans, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [n, heads, nope + rope], tokens any stride apart, on K and V of `latents` [m, rank + rope]:
        out [n, heads, value] and the natural logarithm of the sums [n, heads] float32."""
        ...


@dataclass(slots=True)
class _Gather:
    """Latents to expand: their slots [m] int64, whose queries see them, and how. `parts`: how often the
    queries stand in the spans."""

    slots: torch.Tensor
    queries: slice
    spans: Spans
    parts: int = 1


class MlaAttention:
    """`absorbing`, `expanding`: who computes which form. `ups`: by layer. `most_expanded`: tokens
    expanded at once, so far."""

    wants_new = False

    def __init__(
        self,
        absorbing: MlaCore,
        expanding: MlaCore,
        merge: MergeState,
        ups: Sequence[UpProjection],
        settings: MlaSettings,
    ) -> None:
        names = dict.fromkeys((expanding.name, absorbing.name))
        self.name = "+".join(names)
        self.settings = settings
        self.most_expanded = 0
        self.form: Form | None = None  # of this step's slices that are not decodes
        self._core = absorbing
        self._expanding = expanding
        self._merge = merge
        self._ups = ups
        self._num_absorbed = 0  # tokens, they come first
        self._gathers: list[_Gather] = []

    def plan(self, batch: AttentionBatch) -> None:
        self._expanding.start()
        count = batch.num_decode
        starts, lengths = batch.starts_host[count:], batch.lengths_host[count:]
        self._gathers = []
        self.form = None
        if lengths:
            has_trees = any(base >= 0 for base in batch.bases_host[count:])
            latent = self._ups[0].arch
            self.form = choose_form(starts, lengths, latent, self.settings)
            if has_trees:
                self.form = "absorbed"
            elif self.form == "one-shot" and all(starts) and self._parts(lengths, starts) > 1:
                self.form = "chunked"
        if self.form in (None, "absorbed"):
            self._num_absorbed = sum(batch.lengths_host)
            self._core.plan(batch)
            return
        self._num_absorbed = count
        if count:
            self._core.plan(decodes_of(batch))
        counts = tuple(lengths)
        if self.form == "chunked" or not any(starts):
            spans = Spans(counts, counts, causal=True)
            self._gathers.append(_Gather(batch.slots[count:], slice(0, sum(lengths)), spans))
            chunks = cut_prefixes(starts, self.settings.chunk_tokens)
            for chunk in chunks:
                seen = lengths[chunk.first : chunk.first + len(chunk.counts)]
                parts = self._parts(seen, chunk.counts)
                self._gathers.append(_gather(batch, lengths, chunk, parts))
        else:
            ends = tuple(start + length for start, length in zip(starts, lengths, strict=True))
            whole = Chunk(0, (0,) * len(ends), ends)
            gather = _gather(batch, lengths, whole)
            gather.spans = Spans(counts, ends, causal=True)
            self._gathers.append(gather)

    def _parts(self, queries: Sequence[int], keys: Sequence[int]) -> int:
        return count_parts(queries, keys, len(self._ups[0].keys), self.settings.processors)

    def capture(self, batch: AttentionBatch) -> None:
        self._gathers = []
        self._num_absorbed = int(batch.slots.shape[0])
        self._core.capture(batch)

    def replay(self, batch: AttentionBatch) -> None:
        self._core.replay(batch)

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
        assert window is None and cap is None, "MLA has neither"
        up, count = self._ups[layer], self._num_absorbed
        if not self._gathers:
            return self._core.absorbed(q, layer, pool, up, scale)
        rest = self._expanded(q[count:], pool.keys(layer), up, scale)
        if not count:
            return rest
        return torch.cat((self._core.absorbed(q[:count], layer, pool, up, scale), rest))

    def _expanded(
        self, q: torch.Tensor, plane: torch.Tensor, up: UpProjection, scale: float
    ) -> torch.Tensor:
        first, *others = self._gathers
        out, lse = self._attend(q, plane, up, first, scale)
        for gather in others:
            at, own = gather.queries, q[gather.queries]
            asked = own.repeat(gather.parts, 1, 1) if gather.parts > 1 else own
            parts = self._attend(asked, plane, up, gather, scale)
            for found in zip(*(torch.split(part, len(own)) for part in parts), strict=True):
                if len(own) == len(out):
                    out, lse = self._merge(out, lse, *found)
                else:
                    out[at], lse[at] = self._merge(out[at], lse[at], *found)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        plane: torch.Tensor,
        up: UpProjection,
        gather: _Gather,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.most_expanded = max(self.most_expanded, len(gather.slots))
        latents = plane[:, 0].index_select(0, gather.slots).to(q.dtype)
        return self._expanding.attend(q, latents, up, gather.spans, scale)


def _gather(batch: AttentionBatch, lengths: Sequence[int], chunk: Chunk, parts: int = 1) -> _Gather:
    """Where the chunk's latents lie, part after part. The page table is the device's."""
    last = chunk.first + len(chunk.counts)
    rows_host = batch.rows_host[batch.num_decode :][chunk.first : last]
    pieces = cut_keys(chunk, parts)
    begins = np.array([begin for piece in pieces for begin in piece.begins])
    counts = np.array([count for piece in pieces for count in piece.counts])
    offsets = np.repeat(begins - (np.cumsum(counts) - counts), counts)
    repeated = np.repeat(np.array(rows_host * parts), counts)
    places = np.stack((repeated, np.arange(len(offsets)) + offsets))
    rows, positions = send(places, batch.page_table.device)
    pages = batch.page_table[rows, positions // batch.page_size].long()
    slots = pages * batch.page_size + positions % batch.page_size
    before = sum(lengths[: chunk.first])
    queries = tuple(lengths[chunk.first : last])
    spans = Spans(queries * parts, tuple(counts.tolist()), causal=False)
    return _Gather(slots, slice(before, before + sum(queries)), spans, parts)


def decodes_of(batch: AttentionBatch) -> AttentionBatch:
    """The batch without its other slices."""
    count = batch.num_decode
    return replace(
        batch,
        rows=batch.rows[:count],
        starts=batch.starts[:count],
        lengths=batch.lengths[:count],
        rows_host=batch.rows_host[:count],
        starts_host=batch.starts_host[:count],
        lengths_host=batch.lengths_host[:count],
        slots=batch.slots[:count],
        positions=batch.positions[:count],
        bases=None if batch.bases is None else batch.bases[:count],
        bases_host=batch.bases_host[:count],
        visible=None if batch.visible is None else batch.visible[:count],
    )
