"""Router and experts at serving sizes: every plan against the reference, and recorded as a step is."""

from __future__ import annotations

import pytest
import torch

from kernels.moe import Routing, pack_experts, route
from kernels.moe.plans import FETCHED, find_plan

BF16 = torch.bfloat16
HIDDEN, INNER, EXPERTS, TOP = 2048, 768, 128, 8
ROUTING = Routing(num_experts=EXPERTS, top_k=TOP, renormalize=True)
TOKENS = (1, 7, 8, 9, 64, 100, 300, 1000, 4096)


def make_weights() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, device="cuda", dtype=BF16)
    down = torch.randn(EXPERTS, HIDDEN, INNER, device="cuda", dtype=BF16)
    return gate_up.mul_(HIDDEN**-0.5), down.mul_(INNER**-0.5)


def make_inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens)
    return (
        torch.randn(tokens, HIDDEN, device="cuda").to(BF16),
        torch.randn(tokens, EXPERTS, device="cuda"),
    )


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_experts_are_the_references(quantization: str | None) -> None:
    gate_up, down = make_weights()
    exact = pack_experts(gate_up.clone(), down, implementation="reference")
    packed = pack_experts(gate_up, down, quantization=quantization, implementation="triton")
    for tokens in TOKENS:
        x, logits = make_inputs(tokens)
        weights, experts = route(logits, ROUTING, implementation="triton")
        wanted_weights, wanted = route(logits, ROUTING)
        assert torch.equal(experts, wanted)
        torch.testing.assert_close(weights, wanted_weights)
        difference = packed(x, weights, experts).float() - exact(x, weights, experts).float()
        size = exact(x, weights, experts).float().norm()
        assert difference.norm() <= (1.5e-2 if quantization is None else 1e-1) * size, tokens


@pytest.mark.parametrize("inner", [768, 1408, 2048])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_few_tokens_with_experts_of_other_widths(inner: int, quantization: str | None) -> None:
    """One entry, eight, and as many as few tokens may have; again and again, each kernel early."""
    torch.manual_seed(inner)
    count = 40
    gate_up = torch.randn(count, 2 * inner, HIDDEN, device="cuda", dtype=BF16)
    down = torch.randn(count, HIDDEN, inner, device="cuda", dtype=BF16)
    gate_up, down = gate_up.mul_(HIDDEN**-0.5), down.mul_(inner**-0.5)
    exact = pack_experts(gate_up.clone(), down.clone(), implementation="reference")
    packed = pack_experts(gate_up, down, quantization=quantization, implementation="triton")
    for tokens, top in ((1, 1), (1, 8), (8, 8), (21, 3)):
        routing = Routing(num_experts=count, top_k=top, renormalize=True)
        steps = [
            (
                torch.randn(tokens, HIDDEN, device="cuda").to(BF16),
                torch.randn(tokens, count, device="cuda"),
            )
            for _ in range(8)
        ]
        found = []
        for x, logits in steps:  # without anything between
            found.append(packed(x, *route(logits, routing, implementation="triton")))
        for (x, logits), made in zip(steps, found, strict=True):
            whole = exact(x, *route(logits, routing)).float()
            limit = 1.5e-2 if quantization is None else 1e-1
            assert (made.float() - whole).norm() <= limit * whole.norm(), (tokens, top)


@pytest.mark.parametrize("tokens", [1, 33, 4096])
def test_a_recorded_step_is_played_with_other_choices(tokens: int) -> None:
    gate_up, down = make_weights()
    packed = pack_experts(gate_up, down, implementation="triton")
    x, logits = make_inputs(tokens)

    def step() -> torch.Tensor:
        return packed(x, *route(logits, ROUTING, implementation="triton"))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        logits.copy_(torch.randn_like(logits))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, step())


def test_invariant_experts_give_a_token_the_same_bits_in_any_company() -> None:
    gate_up, down = make_weights()
    packed = pack_experts(gate_up, down, invariant=True, implementation="triton")
    x, logits = make_inputs(1000)
    weights, experts = route(logits, ROUTING, implementation="triton")
    whole = packed(x, weights, experts)
    for own in (slice(0, 1), slice(3, 11), slice(100, 400)):
        part = packed(x[own].contiguous(), weights[own].contiguous(), experts[own].contiguous())
        assert torch.equal(part, whole[own])


def test_very_many_tokens_take_the_copy_engine() -> None:
    assert find_plan(4096 * TOP, EXPERTS, can_fetch=True) == FETCHED
