"""Batches over a pool of latents, attention by the formula taken literally, and facts of a tiny
model."""

from __future__ import annotations

import torch

from srt.cache.pools import LatentPool
from srt.config.facts import ModelFacts
from srt.layers.latent import LatentArch, UpProjection
from srt.protocols.attention import AttentionBatch

PAGE = 4
HEADS = 3
LATENT = LatentArch(rank=16, nope=8, rope=4, value=12, q_rank=None, scale=0.3, interleaved=True)
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "intermediate_size": 64,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
}
FACTS = ModelFacts(
    name="tiny",
    path="nowhere",
    format="safetensors",
    architecture="DeepseekV2ForCausalLM",
    config=CONFIG,
    context_length=128,
    dtype="bfloat16",
    num_layers=2,
    hidden_size=48,
    num_heads=3,
    num_kv_heads=3,
    head_dim=48,
    vocab_size=97,
    num_parameters=0,
    end_token_ids=[2],
)


class LatentBatch:
    """One layer. Slices of `lengths` new tokens behind prefixes of `starts`, `decodes` of them first;
    their latents are in pages in no order."""

    def __init__(
        self,
        *,
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
        decodes: int = 0,
        latent: LatentArch = LATENT,
        heads: int = HEADS,
        page: int = PAGE,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(len(starts))

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

        def ints(values: object, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=kind, device=device)

        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        needs = [-(-end // page) for end in ends]
        order = (1 + torch.randperm(sum(needs), generator=generator)).tolist()
        table = torch.zeros(len(starts), max(needs), dtype=torch.int32)
        for row, need in enumerate(needs):
            table[row, :need] = torch.tensor([order.pop() for _ in range(need)])
        self.pool = LatentPool(
            num_pages=1 + sum(needs),
            page_size=page,
            num_layers=1,
            rank=latent.rank,
            rope=latent.rope,
            dtype=dtype,
            device=torch.device(device),
        )
        self.pool.keys(0).copy_(noise(*self.pool.keys(0).shape))
        places = [
            (row, position)
            for row, (start, end) in enumerate(zip(starts, ends, strict=True))
            for position in range(start, end)
        ]
        slots = [int(table[row, at // page]) * page + at % page for row, at in places]
        self.heads = heads
        self.latent = latent
        self.up = UpProjection(
            noise(heads * (latent.nope + latent.value), latent.rank) * latent.rank**-0.5, latent
        )
        self.q = noise(len(places), heads, latent.query)
        self.batch = AttentionBatch(
            num_decode=decodes,
            page_size=page,
            page_table=table.to(device),
            rows=ints(range(len(starts))),
            starts=ints(starts),
            lengths=ints(lengths),
            rows_host=list(range(len(starts))),
            starts_host=list(starts),
            lengths_host=list(lengths),
            slots=ints(slots, torch.int64),
            positions=ints([at for _, at in places], torch.int64),
        )


def literal(case: LatentBatch) -> torch.Tensor:
    """Every head's K and V of every latent, then softmax: [T, heads, value] float32."""
    batch, page = case.batch, case.batch.page_size
    outs, first = [], 0
    for row, start in enumerate(batch.starts_host):
        length = batch.lengths_host[row]
        at = torch.arange(start + length, device=case.q.device)
        slots = batch.page_table[row, at // page].long() * page + at % page
        latents = case.pool.keys(0)[slots, 0].float()
        k_up, v_up = case.up.keys.float(), case.up.values.float()
        latent, key = latents.split([case.latent.rank, case.latent.rope], dim=1)
        k = torch.cat(
            (
                torch.einsum("nr,hdr->nhd", latent, k_up),
                key[:, None].expand(-1, case.heads, -1),
            ),
            dim=-1,
        )
        v = torch.einsum("nr,hrd->nhd", latent, v_up)
        q = case.q[first : first + length].float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * case.latent.scale
        unseen = at[None, :] > start + torch.arange(length, device=at.device)[:, None]
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        first += length
    return torch.cat(outs)
