"""MLA by our Triton kernels, in the absorbed form and the expanded one.

Nothing of a decode step is planned on the host, so a recorded step needs no preparation.
"""

from __future__ import annotations

import torch

from kernels.mla_attention.triton import (
    LatentAttention,
    TileShape,
    Work,
    choose_splits,
    cut_slices,
    decode_shape,
    extend_shape,
    fixed_shape,
)
from kernels.mla_attention.triton_few import MOST_TOKENS, FewTokens
from kernels.mla_attention.triton_spans import SpanAttention, cut_spans
from kernels.transfer import send
from srt.attention.mla import Spans
from srt.layers.latent import UpProjection
from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool


class TritonMla:
    """A `srt.attention.mla.MlaCore`. Few tokens have the products around their attention done by kernels
    that do without a launch to join parts. `deterministic`: these for all tokens, since the library's
    depend on their number; one tile shape for everything and no tile's keys split. So a token's bits
    depend on its own row only."""

    name = "triton"

    def __init__(self, heads: int, *, deterministic: bool = False) -> None:
        self._heads = heads
        self._deterministic = deterministic
        self._spans = SpanAttention()
        self._tiles: dict[Spans, torch.Tensor] = {}  # of this step
        self._latents: LatentAttention | None = None
        self._works: list[tuple[slice, Work]] = []
        self._few = FewTokens()
        self._is_few = False

    def plan(self, batch: AttentionBatch) -> None:
        self._open(batch)
        device, count = batch.page_table.device, batch.num_decode
        if count:
            shape = fixed_shape() if self._deterministic else decode_shape()
            self._works.append((slice(0, count), self._work(batch, count, shape, 1)))
        if lengths := batch.lengths_host[count:]:
            shape = fixed_shape() if self._deterministic else extend_shape()
            rows, starts = batch.rows_host[count:], batch.starts_host[count:]
            tiles, ends = (
                send(each, device) for each in cut_slices(rows, starts, lengths, self._heads, shape)
            )
            work = self._work(batch, len(tiles), shape, 0, tiles, ends)
            self._works.append((slice(count, count + len(ends)), work))
        self._note_few(batch)

    def capture(self, batch: AttentionBatch) -> None:
        """Slices of one length: decodes, or guesses to be verified."""
        [length] = set(batch.lengths_host)
        self._open(batch)
        usual = decode_shape() if length == 1 else extend_shape()
        shape = fixed_shape() if self._deterministic else usual
        pieces = -(-length // shape.per_tile(self._heads))
        work = self._work(batch, len(batch.rows_host) * pieces, shape, length)
        self._works = [(slice(0, length * len(batch.rows_host)), work)]
        self._note_few(batch)

    def replay(self, batch: AttentionBatch) -> None:
        """The kernel reads all it needs from the static tensors."""

    def start(self) -> None:
        """A new step: what was cut for the spans of the last one is not needed any more."""
        self._tiles.clear()

    def absorbed(
        self, q: torch.Tensor, layer: int, pool: KVPool, up: UpProjection, scale: float
    ) -> torch.Tensor:
        assert self._latents is not None, "absorbed before plan"
        plane = pool.keys(layer)
        by_token = self._is_few or self._deterministic
        q_latent = self._few.absorb(q, up.keys) if by_token else up.absorb(q)
        sums = torch.empty_like(q_latent)
        parts: torch.Tensor | None = None
        for at, work in self._works:
            parts = self._latents.run(
                work, q_latent[at], q[at], plane, sums[at], scale, folds=not self._is_few
            )
        if by_token:
            return self._few.release(sums, parts, up.values, self._works[0][1])
        out = q.new_empty(*q.shape[:2], up.arch.value)
        up.release(sums, out)
        return out

    def attend(
        self, q: torch.Tensor, latents: torch.Tensor, up: UpProjection, spans: Spans, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = self._tiles.get(spans)
        if tiles is None:
            cut = cut_spans(spans.queries, spans.keys, spans.causal)
            tiles = self._tiles[spans] = send(cut, q.device)
        turned = latents[:, up.arch.rank :]
        return self._spans.run(q, up.project(latents), turned, tiles, spans.causal, scale)

    def _open(self, batch: AttentionBatch) -> None:
        assert batch.bases is None, "the capability table says so"
        if self._latents is None:
            self._latents = LatentAttention(batch.page_table.device)
        self._works = []

    def _note_few(self, batch: AttentionBatch) -> None:
        self._is_few = (
            not self._deterministic
            and len(self._works) == 1
            and sum(batch.lengths_host) <= MOST_TOKENS
        )

    def _work(
        self,
        batch: AttentionBatch,
        num: int,
        shape: TileShape,
        length: int,
        tiles: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
    ) -> Work:
        splits = 1
        if not self._deterministic:
            blocks = -(-self._heads // shape.group(self._heads))
            splits = choose_splits(num * blocks, shape, batch.page_table.device)
        return Work(
            num=num,
            shape=shape,
            splits=splits,
            page_table=batch.page_table,
            page_size=batch.page_size,
            rows=batch.rows,
            starts=batch.starts,
            length=length,
            tiles=tiles,
            ends=ends,
        )
