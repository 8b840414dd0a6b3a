"""Decode steps recorded once per batch size and played back: a step of small kernels costs the host one
launch instead of hundreds.

Everything a recorded step reads lies in static tensors: two numbers per row (which row, where it
starts), the page table and the rows' last tokens. The rest is computed from them on the device. A
batch is padded to the next recorded size with the row that belongs to nobody.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from srt.protocols.attention import AttentionBatch
from srt.protocols.forward_batch import ForwardBatch
from srt.runner.model_runner import ModelRunner
from srt.runner.page_table import Ints
from srt.runner.staging import Staging, aligned
from srt.runner.timeline import Timeline

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Recorded:
    """One batch size. `made`: the logits [size, V] float32 of the last time it was played. The graph
    knows addresses only, so what it reads and writes is held here."""

    batch: AttentionBatch
    token_ids: torch.Tensor
    play: Callable[[], None]
    made: list[torch.Tensor]


class DecodeGraphs:
    """`sizes` ascending; () records nothing, and no batch fits then."""

    def __init__(
        self, runner: ModelRunner, timeline: Timeline, staging: Staging, sizes: tuple[int, ...]
    ) -> None:
        self._runner = runner
        self._timeline = timeline
        self._staging = staging
        self._sizes = sizes
        self._recorded: dict[int, Recorded] = {}
        most = max(sizes, default=0)
        self._most = most
        device = runner.device
        # Each array begins where staging puts it.
        stride = aligned(4 * most)
        self._static = torch.zeros(2 * stride, dtype=torch.uint8, device=device)
        self._rows, self._starts = (
            self._static[at : at + 4 * most].view(torch.int32) for at in (0, stride)
        )
        self._lengths = torch.ones(most, dtype=torch.int32, device=device)
        self._rows_host = np.full(most, runner.table.padding_row, dtype=np.int32)
        self._starts_host = np.zeros(most, dtype=np.int32)

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether the batch is nothing but plain decodes, not too many of them."""
        return len(batch.slices) <= self._most and all(
            piece.tokens is None and piece.sample and not piece.targets for piece in batch.slices
        )

    @property
    def missing(self) -> list[int]:
        """Sizes not recorded yet."""
        return [size for size in self._sizes if size not in self._recorded]

    def size_for(self, num: int) -> int:
        """The size that `num` rows are padded to: the smallest recorded one, if there is any."""
        fitting = self._sizes[bisect_left(self._sizes, num) :]
        return next((size for size in fitting if size in self._recorded), fitting[0])

    def run(
        self, batch: ForwardBatch, where: Ints, pages: Ints
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [size, V] and rows [size] int32, of which the first `len(batch.slices)` count; both are
        valid until the next step. `where`, `pages`: the page table's news, see `PageTable.note`."""
        num = len(batch.slices)
        recorded = self.record(self.size_for(num))
        size = len(recorded.batch.rows)
        rows, starts = self._rows_host, self._starts_host
        rows[:num] = [piece.row for piece in batch.slices]
        starts[:num] = [piece.start for piece in batch.slices]
        rows[num:size] = self._runner.table.padding_row
        starts[num:size] = 0
        self._staging.send([rows, starts], self._static)
        if len(where):
            self._runner.apply_table(*self._staging.send([where, pages]))
        recorded.batch.rows_host = rows[:size].tolist()
        recorded.batch.starts_host = starts[:size].tolist()
        self._runner.backend.replay(recorded.batch)
        recorded.play()
        return recorded.made[0], recorded.batch.rows

    def record(self, size: int) -> Recorded:
        found = self._recorded.get(size)
        if found is None:
            began = perf_counter()
            found = self._recorded[size] = self._record(size)
            logger.info("decode graph of %d rows: %.3f s", size, perf_counter() - began)
        return found

    def _record(self, size: int) -> Recorded:
        """Padding rows alone stand in for a batch: what they compute is nobody's."""
        runner = self._runner
        device = runner.device
        runner_table = runner.table
        self._rows[:size] = runner_table.padding_row
        self._starts[:size] = 0
        token_ids, positions, slots = (
            torch.zeros(size, dtype=torch.int64, device=device) for _ in range(3)
        )
        batch = AttentionBatch(
            num_decode=size,
            page_size=runner.pool.page_size,
            page_table=runner_table.tensor,
            rows=self._rows[:size],
            starts=self._starts[:size],
            lengths=self._lengths[:size],
            rows_host=[runner_table.padding_row] * size,
            starts_host=[0] * size,
            lengths_host=[1] * size,
            slots=slots,
            positions=positions,
            is_settled=True,
        )
        runner.backend.capture(batch)
        made: list[torch.Tensor] = []

        def work() -> None:
            runner.step_ops.decode_inputs(
                batch.rows,
                batch.starts,
                runner_table.tensor,
                runner.last_tokens,
                batch.page_size,
                token_ids,
                positions,
                slots,
            )
            made[:] = [runner.logits(runner.model_forward(token_ids, batch, runner.backend))]

        play = self._timeline.capture(work)
        return Recorded(batch=batch, token_ids=token_ids, play=play, made=made)
