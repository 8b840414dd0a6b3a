"""The absorbed form of MLA by FlashInfer's kernel over pages of latents.

It takes the latent and the rotated key as two tensors any stride apart, so both are views of the pool's
plane, and the rotated part of the queries is one of the queries. Its masks are right for heads that
divide its tiles of 64 and 128 rows, and a plan holds so many tiles and no more: it does not check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels.transfer import pin
from srt.attention.flashinfer_operator import kernel_of
from srt.attention.flashinfer_plan import Planned, Shape, list_pages, running
from srt.layers.latent import UpProjection
from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool

TILE = 64  # rows, one for each token and head
MOST_TILES = 16384 - 256  # the rest: parts of keys, at most one for each multiprocessor


class FlashInferAbsorbed:
    """Eager steps take turns on two wrappers; each recorded batch size has its own. A plan wants the
    scale, so it is made in the step's first layer. `space`: the workspace, which holds nothing from
    launch to launch."""

    def __init__(self, space: Callable[[torch.device], torch.Tensor]) -> None:
        self._space = space
        self._pair: list[Planned] = []
        self._recorded: dict[int, Planned] = {}
        self._batch: AttentionBatch | None = None
        self._is_recording = False
        self._planned: Planned | None = None  # for this step

    def plan(self, batch: AttentionBatch) -> None:
        assert batch.bases is None, "the capability table says so"
        self._batch, self._planned, self._is_recording = batch, None, False

    def capture(self, batch: AttentionBatch) -> None:
        """The first forward from here on plans, so it must run before the recording begins."""
        assert set(batch.lengths_host) == {1}, "only decodes are recorded"
        self.plan(batch)
        self._is_recording = True
        size = len(batch.rows_host)
        if size not in self._recorded:
            self._recorded[size] = Planned(self._recording_wrapper(batch, size))

    def replay(self, batch: AttentionBatch) -> None:
        planned = self._recorded[len(batch.rows_host)]
        assert planned.shape is not None, "replay before the graph was recorded"
        plan_latents(planned, planned.shape, batch)

    def absorbed(
        self, q: torch.Tensor, layer: int, pool: KVPool, up: UpProjection, scale: float
    ) -> torch.Tensor:
        sums = self.attend(up.absorb(q), q[:, :, up.arch.nope :], pool.keys(layer), scale)
        out = q.new_empty(*q.shape[:2], up.arch.value)
        up.release(sums, out)
        return out

    def attend(
        self, q_latent: torch.Tensor, turned: torch.Tensor, plane: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """q_latent [n, heads, rank] and the rotated part of the queries, turned [n, heads, rope], on
        latents, plane [slots, 1, rank + rope]: their weighted sums [n, heads, rank]."""
        rank = q_latent.shape[2]
        assert self._batch is not None, "absorbed before plan"
        if self._planned is None:
            self._planned = self._prepare(self._batch, q_latent, plane, scale)
        pages = plane.view(-1, self._batch.page_size, plane.shape[2])
        sums = torch.empty_like(q_latent)
        self._planned.wrapper.run(q_latent, turned, pages[..., :rank], pages[..., rank:], out=sums)
        return sums

    def _prepare(
        self, batch: AttentionBatch, q_latent: torch.Tensor, plane: torch.Tensor, scale: float
    ) -> Planned:
        if self._is_recording:
            planned = self._recorded[len(batch.rows_host)]
        else:
            planned = self._turn(q_latent.device)
        shape = Shape(
            heads=q_latent.shape[1],
            num_kv=1,
            dim=q_latent.shape[2],
            rope=plane.shape[2] - q_latent.shape[2],
            page_size=batch.page_size,
            scale=scale,
            dtype=q_latent.dtype,
            kv_dtype=plane.dtype,
        )
        plan_latents(planned, shape, batch)
        return planned

    def _turn(self, device: torch.device) -> Planned:
        """The wrapper that was not used last."""
        if not self._pair:
            self._pair = [Planned(self._wrapper(device)) for _ in range(2)]
        self._pair.reverse()
        return self._pair[0]

    def _recording_wrapper(self, batch: AttentionBatch, size: int) -> Any:
        device = batch.page_table.device

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return self._wrapper(
            device,
            use_cuda_graph=True,
            qo_indptr=ints(size + 1),
            kv_indptr=ints(size + 1),
            kv_indices=ints(size * batch.page_table.shape[1]),
            kv_len_arr=ints(size),
        )

    def _wrapper(self, device: torch.device, **buffers: object) -> Any:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        return BatchMLAPagedAttentionWrapper(
            self._space(device), backend=kernel_of(device), **buffers
        )


def plan_latents(planned: Planned, shape: Shape, batch: AttentionBatch) -> None:
    """Plans all of the batch's slices, decodes and others alike: the last query sees the last key."""
    lengths = np.array(batch.lengths_host, dtype=np.int32)
    ends = np.array(batch.starts_host, dtype=np.int32) + lengths
    tiles = int((-(-lengths * shape.heads // TILE)).sum())
    assert tiles <= MOST_TILES, f"{tiles} tiles of queries do not fit a plan"
    begins, pages, _ = list_pages(batch, slice(None), ends)
    device = batch.page_table.device
    planned.plan(
        shape,
        pin(running(lengths), device),
        begins,
        pages,
        pin(ends, device),
        shape.heads,
        shape.dim,
        shape.rope,
        shape.page_size,
        causal=bool((lengths > 1).any()),
    )
