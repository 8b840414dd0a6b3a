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
    """U and W of one layer, kept as checkpoints have them: [heads * (nope + value), rank].

    keys: [heads, nope, rank]; values: [heads, rank, value]; both are views."""

    __slots__ = ("arch", "weight", "keys", "values", "_whole")

    def __init__(self, weight: torch.Tensor, arch: LatentArch) -> None:
        self.arch = arch
        self.weight = weight
        heads = weight.view(-1, arch.nope + arch.value, arch.rank)
        self.keys = heads[:, : arch.nope]
        self.values = heads[:, arch.nope :].transpose(1, 2)
        self._whole: torch.Tensor | None = None

    def project(self, latents: torch.Tensor) -> torch.Tensor:
        """latents [n, rank + rope] -> [n, heads, nope + value]: of each head K without its rotated part,
        then V."""
        made = F.linear(latents[:, : self.arch.rank], self.weight)
        return made.view(len(latents), len(self.keys), -1)

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """latents [n, rank + rope] -> K [n, heads, nope + rope], V [n, heads, value]."""
        arch, both = self.arch, self.project(latents)
        turned = latents[:, None, arch.rank :].expand(-1, len(self.keys), -1)
        return torch.cat((both[:, :, : arch.nope], turned), dim=2), both[:, :, arch.nope :]

    def expand_at_once(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as views of one product [n, heads, nope + rope + value], whose weight has a unit
        matrix for the rotated part: a third more to multiply, but no copy to its place afterwards."""
        if self._whole is None:
            self._whole = self._weigh_rotated()
        made = F.linear(latents, self._whole).view(len(latents), len(self.keys), -1)
        return made[:, :, : self.arch.query], made[:, :, self.arch.query :]

    def _weigh_rotated(self) -> torch.Tensor:
        """[heads * (nope + rope + value), rank + rope]."""
        arch = self.arch
        whole = self.weight.new_zeros(len(self.keys), arch.query + arch.value, arch.width)
        whole[:, : arch.nope, : arch.rank] = self.keys
        whole[:, arch.nope : arch.query, arch.rank :] = torch.eye(arch.rope, device=whole.device)
        whole[:, arch.query :, : arch.rank] = self.values.transpose(1, 2)
        return whole.view(-1, arch.width)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """q [n, heads, nope + rope] -> queries on latents, [n, heads, rank]."""
        out = q.new_empty(*q.shape[:2], self.arch.rank)
        torch.bmm(q[:, :, : self.arch.nope].transpose(0, 1), self.keys, out=out.transpose(0, 1))
        return out

    def release(self, latents: torch.Tensor, out: torch.Tensor) -> None:
        """latents [n, heads, rank], weighted sums -> out [n, heads, value]."""
        torch.bmm(latents.transpose(0, 1), self.values, out=out.transpose(0, 1))
