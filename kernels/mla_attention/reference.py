"""Softmax taken literally, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def attend_latents(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    plane: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    rank, rope = q_latent.shape[2], plane.shape[2] - q_latent.shape[2]
    queries = torch.cat((q_latent, q[:, :, q.shape[2] - rope :]), dim=-1).float()
    outs, first = [], 0
    for row, start, length in zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        at = torch.arange(start + length, device=plane.device)
        slots = page_table[row, at // page_size].long() * page_size + at % page_size
        seen = plane[slots, 0].float()
        scores = torch.einsum("thd,nd->htn", queries[first : first + length], seen) * scale
        unseen = at[None, :] > start + torch.arange(length, device=at.device)[:, None]
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("htn,nd->thd", weights, seen[:, :rank]))
        first += length
    return torch.cat(outs).to(q.dtype)


def attend_spans(
    q: torch.Tensor,
    kv: torch.Tensor,
    turned: torch.Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    nope = q.shape[2] - turned.shape[1]
    shared = turned[:, None].expand(-1, q.shape[1], -1)
    k, v = torch.cat((kv[:, :, :nope], shared), dim=2), kv[:, :, nope:]
    outs, sums = [], []
    parts = ((q, queries), (k, keys), (v, keys))
    pieces = (torch.split(tensor, list(sizes)) for tensor, sizes in parts)
    for q_span, k_span, v_span in zip(*pieces, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q_span.float(), k_span.float()) * scale
        if causal:
            unseen = torch.ones_like(scores[0], dtype=torch.bool)
            scores = scores.masked_fill(unseen.triu(len(k_span) - len(q_span) + 1), -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        outs.append(torch.einsum("hqk,khd->qhd", weights, v_span.float()).to(q.dtype))
        sums.append(lse.transpose(0, 1))
    return torch.cat(outs), torch.cat(sums).contiguous()
