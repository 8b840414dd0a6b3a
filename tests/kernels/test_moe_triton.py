"""The GPU's router and experts against the reference: here interpreted, on a GPU for real."""

from __future__ import annotations

import pytest
import torch

from kernels.moe import Routing, pack_experts, plans, route
from kernels.rms_norm import rms_norm
from tests.triton_loops import mend_loop_bounds

BF16 = torch.bfloat16
PLANS = [plans.FEW, plans.SMALL, plans.MIDDLE, plans.LARGE, plans.LARGEST, plans.FETCHED]
STREAMED = plans.Plan(
    128, plans.FetchPlan(256, 64, 3, 8, streams=1), plans.FetchPlan(128, 64, 3, 8, streams=1)
)
PLANS.append(STREAMED)


@pytest.fixture
def device(device_for, library_for, monkeypatch) -> str:
    library_for("triton")
    mend_loop_bounds(monkeypatch)
    return device_for("triton")


ROUTINGS = [
    Routing(num_experts=6, top_k=2),
    Routing(num_experts=128, top_k=8, renormalize=True),
    Routing(num_experts=60, top_k=6, scale=16.0, groups=5, top_groups=3),
    Routing(num_experts=64, top_k=5, scoring="sigmoid", renormalize=True, scale=2.5),
    Routing(
        num_experts=256,
        top_k=8,
        scoring="sigmoid",
        renormalize=True,
        scale=2.5,
        groups=8,
        top_groups=4,
        has_bias=True,
    ),
    Routing(num_experts=12, top_k=3, groups=4, top_groups=4),
    Routing(num_experts=6, top_k=4, forced_even=True),
    Routing(num_experts=6, top_k=2, scale=3.0, shared=2),
    Routing(num_experts=8, top_k=2, renormalize=True, groups=2, shared=1, forced_even=True),
]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routes_as_the_reference(routing, device):
    torch.manual_seed(routing.num_experts)
    logits = torch.randn(9, routing.num_experts, device=device)
    bias = torch.randn(routing.num_experts, device=device).mul_(0.3) if routing.has_bias else None
    weights, experts = route(logits, routing, bias, implementation="triton")
    wanted_weights, wanted = route(logits, routing, bias)
    assert experts.dtype == torch.int32
    assert torch.equal(experts, wanted)
    torch.testing.assert_close(weights, wanted_weights)


def make_experts(tokens, hidden, inner, count, top, device, dtype=BF16):
    torch.manual_seed(tokens + hidden + inner)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    gate_up = torch.randn(count, 2 * inner, hidden, device=device).mul_(hidden**-0.5).to(dtype)
    down = torch.randn(count, hidden, inner, device=device).mul_(inner**-0.5).to(dtype)
    routing = Routing(num_experts=count, top_k=top)
    logits = torch.randn(tokens, count, device=device)
    logits[:, -1] -= 20  # an expert whom nobody wants
    return x, gate_up, down, *route(logits, routing)


def exactly(x, gate_up, down, weights, experts, first=0):
    packed = pack_experts(gate_up.float(), down.float(), first=first, implementation="reference")
    return packed(x.float(), weights, experts)


def close(found, exact, limit=1.5e-2):
    """Within what rounding to bfloat16 costs; the interpreter cuts off instead."""
    assert found.shape == exact.shape
    assert (found.float() - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(3, 128, 128), (5, 80, 24)])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_every_plan_computes_what_the_reference_does(
    plan, tokens, hidden, inner, quantization, device
):
    x, gate_up, down, *chosen = make_experts(tokens, hidden, inner, 6, 2, device)
    exact = exactly(x, gate_up, down, *chosen)
    packed = pack_experts(gate_up, down, quantization=quantization, implementation="triton")
    step = 64 if quantization is None else 128
    if quantization and plan == plans.FETCHED:
        plan = plans.FETCHED_FP8
    if plan.tile == 128 and plan != plans.LARGEST and (hidden % step or inner % step):
        pytest.skip("the copy engine takes no such weights")
    found = packed.run(x, *chosen, None, plan)
    assert found.dtype == BF16
    # Tokens, too, in 8 bits, or weights only.
    limit = 0.12 if plan in (plans.FETCHED_FP8, STREAMED) else 0.06
    close(found, exact, 1.5e-2 if quantization is None else limit)


@pytest.mark.parametrize(("inner", "top"), [(768, 1), (1408, 3), (1408, 8), (2048, 2), (9216, 2)])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_few_tokens_with_experts_of_any_width(inner, top, quantization, device):
    """Experts of other ranks among a token's, too."""
    x, gate_up, down, *chosen = make_experts(2, 16, inner, 9, top, device)
    exact = exactly(x, gate_up[2:], down[2:], *chosen, first=2)
    packed = pack_experts(
        gate_up[2:].clone(),
        down[2:].clone(),
        first=2,
        quantization=quantization,
        implementation="triton",
    )
    close(packed.run(x, *chosen, None, plans.FEW), exact, 1.5e-2 if quantization is None else 0.06)


@pytest.mark.parametrize("tokens", [0, 1, 33, 140])
def test_any_number_of_tokens(tokens, device):
    """Of 140 an expert has several blocks."""
    x, gate_up, down, *chosen = make_experts(tokens, 64, 32, 4, 2, device)
    exact = exactly(x, gate_up, down, *chosen)
    close(pack_experts(gate_up, down, implementation="triton")(x, *chosen), exact)


@pytest.mark.parametrize("entries", [1, 64, 65, 1024, 1025, 4096, 100_000])
def test_plans(entries):
    plan = plans.find_plan(entries, 128)
    assert (plan.tile == 0) == (entries <= plans.FEW_ENTRIES)
    assert plan.tile <= max(16, 4 * entries // 128)
    assert plans.find_plan(entries, 128, invariant=True) == plans.INVARIANT


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_residual_is_added_and_written_over(tokens, device):
    x, gate_up, down, *chosen = make_experts(tokens, 64, 32, 6, 2, device)
    residual = torch.randn(tokens, 64, device=device).to(BF16)
    exact = exactly(x, gate_up, down, *chosen) + residual.float()
    found = pack_experts(gate_up, down, implementation="triton")(x, *chosen, residual)
    assert found.data_ptr() == residual.data_ptr()
    close(found, exact)


def test_few_tokens_take_in_the_norm_before(device):
    stream, gate_up, down, *chosen = make_experts(3, 80, 32, 6, 2, device)
    norm = torch.rand(80, device=device).add_(0.5).to(BF16)
    x = rms_norm(stream.float(), norm.float(), 1e-5, implementation="reference")
    exact = exactly(x, gate_up, down, *chosen) + stream.float()
    packed = pack_experts(gate_up, down, implementation="triton")
    assert packed.takes_norm(6) and not packed.takes_norm(plans.FEW_ENTRIES + 1)
    found = packed.normed(stream, norm, 1e-5, *chosen)
    assert found.data_ptr() == stream.data_ptr()
    close(found, exact)


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("tokens", [3, 40])
def test_ranks_add_up(implementation, tokens, device):
    """Each has its own experts only."""
    x, gate_up, down, *chosen = make_experts(tokens, 64, 32, 6, 2, device)
    exact = exactly(x, gate_up, down, *chosen)
    total = torch.zeros_like(exact)
    for first in (0, 4):
        own = slice(first, first + 4)
        packed = pack_experts(
            gate_up[own].clone(), down[own].clone(), first=first, implementation=implementation
        )
        total += packed(x, *chosen).float()
    close(total, exact)


@pytest.mark.parametrize("tokens", [1, 40])
def test_float32(tokens, device):
    x, gate_up, down, *chosen = make_experts(tokens, 64, 32, 6, 2, device, torch.float32)
    exact = exactly(x, gate_up, down, *chosen)
    found = pack_experts(gate_up, down, implementation="triton")(x, *chosen)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


def test_invariant_experts_give_a_token_the_same_bits_in_any_company(device):
    x, gate_up, down, weights, experts = make_experts(150, 64, 32, 6, 2, device)
    packed = pack_experts(gate_up, down, invariant=True, implementation="triton")
    whole = packed(x, weights, experts)
    for own in (slice(0, 1), slice(3, 5), slice(20, 60), slice(0, 130)):
        assert torch.equal(packed(x[own].contiguous(), weights[own], experts[own]), whole[own])


def test_bad_shapes_and_methods_are_refused():
    with pytest.raises(ValueError, match="even number of rows"):
        pack_experts(torch.zeros(2, 3, 4), torch.zeros(2, 4, 1))
    with pytest.raises(ValueError, match="down must have shape"):
        pack_experts(torch.zeros(2, 4, 4), torch.zeros(2, 4, 3))
    with pytest.raises(ValueError, match="'int8' is not for experts"):
        pack_experts(torch.zeros(2, 4, 4), torch.zeros(2, 4, 2), quantization="int8")
    with pytest.raises(ValueError, match="cannot be chosen"):
        route(torch.zeros(1, 6), Routing(num_experts=6, top_k=2, groups=4))
    with pytest.raises(ValueError, match="top_k must be"):
        route(torch.zeros(1, 6), Routing(num_experts=6, top_k=3, groups=3, top_groups=1))
