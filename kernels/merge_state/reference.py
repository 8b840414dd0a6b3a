"""The rescaling of online softmax (Milakov & Gimelshein 2018), as FlashAttention joins its parts (Dao et
al. 2022): with m = max(a, b) and weights e^(a - m), e^(b - m), out is the weighted mean of the outs and
lse = m + log of the weights' sum. In float32, rounded once.
"""

from __future__ import annotations

import torch


def merge_state(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    peak = torch.maximum(lse_a, lse_b)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)  # or two empty sides would be inf - inf
    weight_a, weight_b = (lse_a - peak).exp(), (lse_b - peak).exp()
    total = weight_a + weight_b
    sums = weigh(out_a, weight_a) + weigh(out_b, weight_b)
    out = sums / total.masked_fill(total == 0, 1.0)[..., None]
    return out.to(out_a.dtype), peak + total.log()


def weigh(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """0 where the weight is, whatever out holds there."""
    return (out.float() * weight[..., None]).masked_fill(weight[..., None] == 0, 0.0)
