"""The router and the experts, against the formula taken literally."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.moe import Routing, pack_experts, route


def test_softmax_greedy() -> None:
    logits = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    weights, experts = route(logits, Routing(num_experts=16, top_k=3, scale=2.0))
    for token in range(7):
        scores = logits[token].softmax(0)
        best = sorted(range(16), key=lambda e: -float(scores[e]))[:3]
        assert experts[token].tolist() == best
        torch.testing.assert_close(weights[token], 2 * scores[best])


@pytest.mark.parametrize("has_bias", [False, True])
def test_only_the_best_groups_are_chosen_from(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 16, generator=generator)
    bias = torch.randn(16, generator=generator) if has_bias else None
    routing = Routing(
        num_experts=16,
        top_k=4,
        scoring="sigmoid",
        renormalize=True,
        groups=4,
        top_groups=2,
        has_bias=has_bias,
    )
    weights, experts = route(logits, routing, bias)
    for token in range(9):
        scores = logits[token].sigmoid()
        choice = scores if bias is None else scores + bias
        worth = [
            float(group.max() if bias is None else group.topk(2).values.sum())
            for group in choice.view(4, 4)
        ]
        groups = sorted(range(4), key=lambda g: -worth[g])[:2]
        allowed = [e for e in range(16) if e // 4 in groups]
        best = sorted(allowed, key=lambda e: -float(choice[e]))[:4]
        assert experts[token].tolist() == best
        torch.testing.assert_close(weights[token], scores[best] / scores[best].sum())


def test_experts() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(11, 8, generator=generator)
    gate_up = torch.randn(5, 12, 8, generator=generator)
    down = torch.randn(5, 8, 6, generator=generator)
    logits = torch.randn(11, 5, generator=generator)
    weights, experts = route(logits, Routing(num_experts=5, top_k=2))
    expected = torch.zeros_like(x)
    for token in range(11):
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[token]).split(6)
            expected[token] += weight * (down[expert] @ (F.silu(gate) * up))
    found = pack_experts(gate_up, down)(x, weights, experts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
