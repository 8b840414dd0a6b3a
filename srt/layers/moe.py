"""A mixture of experts: a router gives every token a few of many small MLPs, and weighs what they make.

    s = softmax(x R^T) or sigmoid(x R^T)                    a score for every expert
    chosen = the top_k of s (+ bias), from the best groups only where experts come in groups
    w = scale * s of the chosen, divided by their sum where `renormalize` says so
    y = sum over the chosen of w_e * down_e(silu(gate_e(x)) * up_e(x)), + shared(x)

The bias chooses, it does not weigh. Scores are computed in float32. A token's result does not depend on
its company but for the rounding of the products. What is here is plain torch, the definition of right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens get their experts. `groups`: experts come in so many groups of neighbours, and only
    those of the `top_groups` best can be chosen; a group is as good as its best expert, or as its two
    best together where there is a bias. `renormalize`: the chosen weights sum up to 1, then `scale`."""

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeArch:
    """`inner`: of one expert. `shared_inner`: of the MLP that every token passes, 0: there is none.
    `layers`: which have experts, the others have an MLP."""

    routing: Routing
    inner: int
    shared_inner: int
    layers: frozenset[int]


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] float32, bias [E] float32 -> weights [T, k] float32 and experts [T, k] int64, best
    first."""
    is_softmax = routing.scoring == "softmax"
    scores = logits.softmax(dim=-1) if is_softmax else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        worth = grouped.amax(-1) if bias is None else grouped.topk(2, dim=-1).values.sum(-1)
        best = worth.topk(routing.top_groups, dim=-1).indices
        is_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
        lowest = 0.0 if bias is None else -torch.inf
        choice = grouped.masked_fill(is_out[..., None], lowest).flatten(1)
    experts = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale, experts


def run_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """x [T, H], gate_up [E, 2 I, H] (gates, then ups), down [E, H, I], weights and experts [T, k] ->
    [T, H] in x's dtype. Reads the choice back to the host."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=len(gate_up)).tolist()
    first = 0
    for expert, count in enumerate(counts):
        if count:
            places = order[first : first + count]
            tokens = places // experts.shape[1]
            gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
            made = F.linear(F.silu(gate) * up, down[expert])
            out.index_add_(0, tokens, made.float() * weights.flatten()[places, None])
        first += count
    return out.to(x.dtype)
