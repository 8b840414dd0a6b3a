"""MLA by FlashInfer: the expanded form by its prefill over K and V side by side, which on Hopper is FA3
and made for heads of 192 and 128 numbers only; the absorbed form is `mla_flashinfer_absorbed`'s.

Its logarithms are those of base 2; who merges wants natural ones. K and V may be any multiple of 16
bytes apart. A plan lies in a wrapper's own memory on the device, so that a step may have several; the
workspace that all wrappers share holds nothing from launch to launch.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from kernels.transfer import pin
from srt.attention.flashinfer_operator import kernel_of
from srt.attention.flashinfer_plan import Planned, Shape, running
from srt.attention.mla import Spans
from srt.attention.mla_flashinfer_absorbed import FlashInferAbsorbed
from srt.layers.latent import UpProjection
from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool

WORKSPACE_BYTES = 256 << 20
LN_2 = 0.6931471805599453


class FlashInferMla:
    """A `srt.attention.mla.MlaCore`. Each of a step's spans has a wrapper of its own, planned in the
    first layer; the next step takes those that were used longest ago."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None
        self._free: deque[Planned] = deque()
        self._used: dict[Spans, Planned] = {}
        self._absorbed = FlashInferAbsorbed(self._space)

    def start(self) -> None:
        self._free.extend(self._used.values())
        self._used.clear()

    def plan(self, batch: AttentionBatch) -> None:
        self._absorbed.plan(batch)

    def capture(self, batch: AttentionBatch) -> None:
        self._absorbed.capture(batch)

    def replay(self, batch: AttentionBatch) -> None:
        self._absorbed.replay(batch)

    def absorbed(
        self, q: torch.Tensor, layer: int, pool: KVPool, up: UpProjection, scale: float
    ) -> torch.Tensor:
        return self._absorbed.absorbed(q, layer, pool, up, scale)

    def attend(
        self, q: torch.Tensor, latents: torch.Tensor, up: UpProjection, spans: Spans, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = up.expand_at_once(latents)
        planned = self._used.get(spans)
        if planned is None:
            planned = self._used[spans] = self._next(q.device)
            self._plan(planned, q, k, v, spans, scale)
        out, lse = planned.wrapper.run(q, k, v, return_lse=True)
        return out, lse.mul_(LN_2)

    def _plan(
        self,
        planned: Planned,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spans: Spans,
        scale: float,
    ) -> None:
        heads = q.shape[1]
        shape = Shape(
            heads=heads,
            num_kv=heads,
            dim=q.shape[2],
            page_size=1,
            scale=scale,
            dtype=q.dtype,
            kv_dtype=k.dtype,
        )
        queries, keys = (
            pin(running(np.array(counts, dtype=np.int32)), q.device)
            for counts in (spans.queries, spans.keys)
        )
        sizes = (heads, heads, q.shape[2], v.shape[2])
        planned.plan(shape, queries, keys, *sizes, causal=spans.causal)

    def _next(self, device: torch.device) -> Planned:
        """Two steps never share one: a plan leaves by a copy out of memory that it still needs."""
        if len(self._free) > len(self._used) + 1:
            return self._free.popleft()
        return Planned(self._wrapper(device))

    def _wrapper(self, device: torch.device) -> Any:
        import flashinfer

        kernel = kernel_of(device)
        return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._space(device), backend=kernel)

    def _space(self, device: torch.device) -> torch.Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace
