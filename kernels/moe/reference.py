"""The router and the experts in plain torch: the definition of right."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.moe.routing import Routing
from kernels.moe.stacked import Stacked


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] float32, bias [E] float32 -> weights [T, k] float32 and experts [T, k] int32, best
    first, then those that are shared."""
    scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        worth = grouped.amax(-1) if bias is None else grouped.topk(2, dim=-1).values.sum(-1)
        best = worth.topk(routing.top_groups, dim=-1).indices
        is_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(is_out[..., None], -torch.inf).flatten(1)
    experts = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if routing.forced_even:
        places = torch.arange(experts.numel(), device=experts.device)
        experts = places.view_as(experts) % routing.num_experts
    weights = weights * routing.scale
    if routing.shared:
        every = torch.arange(routing.shared, device=experts.device) + routing.num_experts
        weights = torch.cat((weights, weights.new_ones(len(weights), routing.shared)), dim=1)
        experts = torch.cat((experts, every.expand(len(experts), -1)), dim=1)
    return weights, experts.to(torch.int32)


class PlainExperts:
    """A `kernels.moe.Experts`, one expert after the other. Reads the choice back to the host."""

    def __init__(
        self, gate_up: Stacked, down: Stacked, first: int = 0, invariant: bool = False
    ) -> None:
        self._gate_up, self._down, self._first = gate_up, down, first
        self.bytes = gate_up.bytes + down.bytes

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat = experts.flatten().long() - self._first
        here = len(self._gate_up.values)
        is_here = (flat >= 0) & (flat < here)
        flat = torch.where(is_here, flat, here)
        order = flat.argsort(stable=True)
        first = 0
        for expert, count in enumerate(flat.bincount(minlength=here)[:here].tolist()):
            if count:
                places = order[first : first + count]
                tokens = places // experts.shape[1]
                gate, up = F.linear(x[tokens], self._gate_up.of(expert, x.dtype)).chunk(2, dim=-1)
                made = F.linear(F.silu(gate) * up, self._down.of(expert, x.dtype))
                out.index_add_(0, tokens, made.float() * weights.flatten()[places, None])
            first += count
        if residual is not None:
            return residual.add_(out.to(x.dtype))
        return out.to(x.dtype)
