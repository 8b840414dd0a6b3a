"""Multi-head latent attention (MLA, arXiv 2405.04434): a token leaves one latent c of `rank` numbers
and one key k_r of `rope` numbers, which all heads share; each head makes its K and V of them.

    K_h = [U_h c, k_r]    V_h = W_h c    score = scale * (q_n . U_h c + q_r . k_r)

Expanded: K and V are computed and attended to as usual. Absorbed: (U_h^T q_n) . c is the same number, so
queries go to the latents, and W_h takes back the weighted sum of these. That reads `rank` + `rope`
numbers per token instead of heads * (nope + rope + value), and multiplies more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentArch:
    """`nope`, `rope`: of a head's query, the part that is not rotated and the part that is. `value`: of
    a head's V. `q_rank`: of the queries' own latent, None: they have none. `scale`: of the scores.
    `interleaved`: neighbours rotate together, else halves."""

    rank: int
    nope: int
    rope: int
    value: int
    q_rank: int | None
    scale: float
    interleaved: bool

    @property
    def width(self) -> int:
        """Numbers that a token leaves in a layer."""
        return self.rank + self.rope

    @property
    def query(self) -> int:
        return self.nope + self.rope


class UpProjection:
    """U and W of one layer. Kept as one matrix [heads * (nope + rope + value), rank] with zeros where
    the rotated key goes, so that one product makes K and V with room for it.

    keys: [heads, nope, rank]; values: [heads, rank, value]; both are views."""

    __slots__ = ("arch", "weight", "keys", "values")

    def __init__(self, weight: torch.Tensor, arch: LatentArch) -> None:
        """weight: [heads * (nope + value), rank], as checkpoints have it."""
        self.arch = arch
        heads = weight.view(-1, arch.nope + arch.value, arch.rank)
        wide = weight.new_zeros(len(heads), arch.query + arch.value, arch.rank)
        wide[:, : arch.nope] = heads[:, : arch.nope]
        wide[:, arch.query :] = heads[:, arch.nope :]
        self.weight = wide.view(-1, arch.rank)
        self.keys = wide[:, : arch.nope]
        self.values = wide[:, arch.query :].transpose(1, 2)

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """latents [n, rank + rope] -> K [n, heads, nope + rope], V [n, heads, value], rows side by
        side."""
        arch = self.arch
        both = F.linear(latents[:, : arch.rank], self.weight)
        heads = both.view(len(latents), -1, arch.query + arch.value)
        k, v = heads[:, :, : arch.query], heads[:, :, arch.query :]
        k[:, :, arch.nope :] = latents[:, None, arch.rank :]
        return k, v

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """q [n, heads, nope + rope] -> queries on latents, [n, heads, rank]."""
        out = q.new_empty(*q.shape[:2], self.arch.rank)
        torch.bmm(q[:, :, : self.arch.nope].transpose(0, 1), self.keys, out=out.transpose(0, 1))
        return out

    def release(self, latents: torch.Tensor, out: torch.Tensor) -> None:
        """latents [n, heads, rank], weighted sums -> out [n, heads, value]."""
        torch.bmm(latents.transpose(0, 1), self.values, out=out.transpose(0, 1))
