"""MLA in plain torch, on any device and dtype: the reference."""

from __future__ import annotations

import torch

from srt.attention.mla import Spans
from srt.attention.sdpa import SdpaAttention
from srt.layers.latent import UpProjection
from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool


class SdpaMla:
    """A `srt.attention.mla.MlaCore`. Absorbed, all query heads share one KV head as wide as the pool."""

    name = "sdpa"

    def __init__(self) -> None:
        self._shared = SdpaAttention()

    def start(self) -> None:
        """Nothing is kept from step to step."""

    def plan(self, batch: AttentionBatch) -> None:
        self._shared.plan(batch)

    def capture(self, batch: AttentionBatch) -> None:
        self._shared.capture(batch)

    def replay(self, batch: AttentionBatch) -> None:
        self._shared.replay(batch)

    def absorbed(
        self, q: torch.Tensor, layer: int, pool: KVPool, up: UpProjection, scale: float
    ) -> torch.Tensor:
        queries = torch.cat((up.absorb(q), q[:, :, up.arch.nope :]), dim=-1)
        sums = self._shared.forward(queries, layer, pool, scale=scale, window=None)
        out = q.new_empty(*q.shape[:2], up.arch.value)
        up.release(sums, out)
        return out

    def attend(
        self, q: torch.Tensor, latents: torch.Tensor, up: UpProjection, spans: Spans, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = up.expand(latents)
        outs, sums = [], []
        parts = ((q, spans.queries), (k, spans.keys), (v, spans.keys))
        pieces = (torch.split(tensor, list(sizes)) for tensor, sizes in parts)
        for queries, keys, values in zip(*pieces, strict=True):
            scores = torch.einsum("qhd,khd->hqk", queries.float(), keys.float()) * scale
            if spans.causal:
                unseen = torch.ones_like(scores[0], dtype=torch.bool)
                scores = scores.masked_fill(unseen.triu(len(keys) - len(queries) + 1), -torch.inf)
            lse = scores.logsumexp(-1)
            weights = (scores - lse[..., None]).exp()
            outs.append(torch.einsum("hqk,khd->qhd", weights, values.float()).to(q.dtype))
            sums.append(lse.transpose(0, 1))
        return torch.cat(outs), torch.cat(sums).contiguous()
