"""python -m bench.kernels.moe [--tokens 1 8] [--search gate down tiles]: router and experts on a GPU,
checked and timed.

Tokens are spread evenly over the experts, as `--moe-force-even-routing` does. Times are of calls in one
CUDA graph, each with other experts, so that few weights of one are in the L2 cache for the next. The
floor is that of the two products: their operations at the tensor cores' rate, or the weights of the
experts that are asked and what goes in and out at the memory's, whichever takes longer. --search times
other plans: for the first product of few tokens, for their second, or for both of many.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from bench.kernels.device import memory_bandwidth, microseconds
from kernels.linear import pack_linear
from kernels.moe import Routing, pack_experts, plans, route
from kernels.moe.order import Sorter
from kernels.moe.plans import DownPlan, FetchPlan, FewPlan, Plan, TilePlan, find_plan
from kernels.moe.triton import GroupedExperts

BF16 = torch.bfloat16
TOKENS = (1, 8, 32, 128, 256, 4096)
PEAK = {None: 788e12, "fp8": 1577e12}
MOST_CALLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    hidden: int
    inner: int
    experts: int
    top: int
    tokens: tuple[int, ...] = TOKENS  # worth a look


SHAPES = (
    Shape(name="Qwen3-30B-A3B", hidden=2048, inner=768, experts=128, top=8),
    Shape(name="DeepSeek-V2-Lite", hidden=2048, inner=1408, experts=64, top=6),
    # As it is served: what its shared experts do is cut into two that every token has.
    Shape(name="Lite, shared too", hidden=2048, inner=1408, experts=66, top=8, tokens=(1, 4, 8)),
)
FEW = (
    *itertools.product((4, 8, 16), (512,), (3, 4), (4,)),
    *((4, 1024, 4, 4), (8, 1024, 3, 4), (8, 512, 4, 8), (2, 512, 4, 2), (4, 256, 5, 2)),
)
DOWN = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 4))
TILES = {
    16: (
        (64, 128, 4, 4, True),
        (64, 256, 3, 4, True),
        (128, 128, 3, 4, True),
        (64, 128, 5, 4, False),
    ),
    32: ((64, 128, 4, 4, True), (128, 128, 3, 4, True), (64, 128, 4, 4, False)),
    64: ((128, 64, 4, 4, False), (128, 128, 3, 4, True), (256, 64, 3, 8, False)),
    128: ((256, 64, 3, 8, False), (128, 64, 4, 8, False)),
}
FETCHES = {
    64: ((128, 64, 4, 4, 0), (256, 64, 4, 8, 0)),
    128: (
        *((256, 64, 4, 8, 0), (256, 64, 3, 8, 0), (128, 64, 4, 8, 0), (128, 64, 3, 8, 0)),
        *((128, 64, 3, 8, 128), (128, 64, 4, 4, 0), (256, 64, 4, 4, 0)),
    ),
}


class Case:
    """Weights of one layer, and calls on them with experts in turn."""

    def __init__(self, shape: Shape, quantization: str | None) -> None:
        self.shape, self.quantization = shape, quantization
        size = (shape.experts, 2 * shape.inner, shape.hidden)
        gate_up = torch.randn(size, device="cuda", dtype=BF16).mul_(shape.hidden**-0.5)
        size = (shape.experts, shape.hidden, shape.inner)
        down = torch.randn(size, device="cuda", dtype=BF16).mul_(shape.inner**-0.5)
        self.exact = pack_experts(gate_up.clone(), down, implementation="reference")
        packed = pack_experts(gate_up, down, quantization=quantization, implementation="triton")
        assert isinstance(packed, GroupedExperts)
        self.packed = packed

    def check(self, tokens: int, plan: Plan) -> None:
        """Of experts by chance, against the reference. Raises AssertionError."""
        shape = self.shape
        x = torch.randn(tokens, shape.hidden, device="cuda").to(BF16)
        logits = torch.randn(tokens, shape.experts, device="cuda")
        routing = Routing(num_experts=shape.experts, top_k=shape.top, renormalize=True)
        weights, experts = route(logits, routing, implementation="triton")
        assert torch.equal(experts, route(logits, routing)[1])
        residual = torch.randn(tokens, shape.hidden, device="cuda").to(BF16)
        exact = self.exact(x, weights, experts).float() + residual.float()
        found = self.packed.run(x, weights, experts, residual.clone(), plan).float()
        error = float((found - exact).norm() / (exact - residual.float()).norm())
        assert error < (2e-2 if self.quantization is None else 1e-1), (shape, tokens, plan, error)

    def calls(self, tokens: int, plan: Plan) -> list[Callable[[], object]]:
        shape = self.shape
        entries = tokens * shape.top
        places = torch.arange(entries, device="cuda", dtype=torch.int32).view(tokens, shape.top)
        count = min(MOST_CALLS, max(1, 4 * shape.experts // entries))
        x = torch.randn(tokens, shape.hidden, device="cuda").to(BF16)
        weights = torch.full((tokens, shape.top), 1 / shape.top, device="cuda")
        return [
            partial(
                self.packed.run,
                x,
                weights,
                ((places + turn * entries) % shape.experts).contiguous(),
                torch.zeros_like(x),
                plan,
            )
            for turn in range(count)
        ]

    def floor(self, tokens: int, bandwidth: float) -> tuple[float, float, float]:
        """Seconds, bytes, operations."""
        shape = self.shape
        entries = tokens * shape.top
        asked = min(shape.experts, entries)
        item = 2 if self.quantization is None else 1
        weights = asked * 3 * shape.hidden * shape.inner * item
        moved = weights + 2 * 2 * tokens * shape.hidden
        operations = 2.0 * entries * 3 * shape.hidden * shape.inner
        return max(moved / bandwidth, operations / PEAK[self.quantization]), moved, operations


def time_plan(case: Case, tokens: int, plan: Plan) -> float:
    return microseconds(case.calls(tokens, plan), rounds=3, at_least=4)


def find(case: Case, tokens: int) -> Plan:
    count = case.shape.experts
    is_fp8 = case.quantization == "fp8"
    return find_plan(tokens * case.shape.top, count, can_fetch=True, is_fp8=is_fp8)


def show(case: Case, tokens: int, bandwidth: float) -> None:
    plan = find(case, tokens)
    case.check(min(tokens, 512), plan)
    taken = time_plan(case, tokens, plan)
    floor, moved, operations = case.floor(tokens, bandwidth)
    print(
        f"{case.shape.name:17} {case.quantization or 'bf16':5} {tokens:5} {taken:8.1f} us "
        f"{moved / taken / 1e6:6.2f} TB/s {operations / taken / 1e6:6.0f} TFLOP/s "
        f"{floor / taken * 1e8:4.0f} % of floor {floor * 1e6:7.1f} us",
        flush=True,
    )


def show_router(shape: Shape) -> None:
    routing = Routing(num_experts=shape.experts, top_k=shape.top, renormalize=True)
    weight = torch.randn(shape.experts, shape.hidden, device="cuda").to(BF16)
    linear = pack_linear(weight, out_dtype=torch.float32, implementation="triton")
    for tokens in TOKENS:
        x = torch.randn(tokens, shape.hidden, device="cuda").to(BF16)
        logits = linear(x)
        product = microseconds([partial(linear, x)], rounds=5, at_least=16)
        choice = microseconds(
            [partial(route, logits, routing, implementation="triton")], rounds=5, at_least=16
        )
        _, experts = route(logits, routing, implementation="triton")
        sort = partial(Sorter(), experts, 64, 0, shape.experts)
        print(
            f"{shape.name:17} router {tokens:5}: product {product:6.1f} us, choice {choice:6.1f}, "
            f"sort {microseconds([sort], rounds=5, at_least=16):6.1f}",
            flush=True,
        )


def show_parts(case: Case, tokens: int) -> None:
    """What a step of many tokens spends where."""
    from torch.profiler import ProfilerActivity, profile

    calls = case.calls(tokens, find(case, tokens))
    for call in calls[:1] * 3:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        calls[0]()
        torch.cuda.synchronize()
    for event in found.key_averages():
        print(f"    {event.key[:60]:60} {event.device_time_total:8.1f} us x{event.count}")


def other_plans(tokens: int, shape: Shape, parts: list[str]) -> Iterator[Plan]:
    """One half changes at a time."""
    entries = tokens * shape.top
    if entries <= 4 * plans.FEW_ENTRIES:
        if "gate" in parts:
            yield from (replace(plans.FEW, gate_up=FewPlan(*few)) for few in FEW)
        if "down" in parts:
            yield from (replace(plans.FEW, down=DownPlan(*down)) for down in DOWN)
    if "tiles" not in parts:
        return
    each = entries / shape.experts
    for tile, shapes in TILES.items():
        if tile > max(16, 4 * each) or (each >= 128 and tile < 64):
            continue
        for rows, block, stages, warps, swap in shapes:
            whole = TilePlan(rows, block, stages, warps, swap)
            yield Plan(tile, whole, whole)
        for numbers in FETCHES.get(tile, ()):
            for streams in (0, 1, 2):
                fetched = FetchPlan(*numbers, streams=streams)
                yield Plan(tile, fetched, fetched)
                if tile == 128:
                    yield replace(plans.FETCHED, gate_up=fetched)
                    yield replace(plans.FETCHED, down=fetched)


def search(case: Case, tokens: int, parts: list[str]) -> None:
    times: list[tuple[float, Plan]] = []
    for plan in dict.fromkeys((find(case, tokens), *other_plans(tokens, case.shape, parts))):
        try:
            case.check(min(tokens, 64), plan)
            times.append((time_plan(case, tokens, plan), plan))
        except Exception as error:  # a shape that does not fit the device
            print(f"    {plan}: {type(error).__name__} {str(error)[:100]}", flush=True)
    print(f"{case.shape.name} {tokens} tokens; planned {times[0][0]:.1f} us", flush=True)
    for taken, plan in sorted(times, key=lambda each: each[0])[:6]:
        print(f"    {taken:8.1f} us {plan}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", nargs="+", choices=("gate", "down", "tiles"))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--only", default="", help="shapes whose names begin so")
    parser.add_argument("--no-fp8", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = memory_bandwidth()
    print(f"memory {bandwidth / 1e12:.2f} TB/s", flush=True)
    for shape in SHAPES:
        asked = [tokens for tokens in options.tokens if tokens in shape.tokens]
        if not asked or not shape.name.startswith(options.only):
            continue
        if not options.search:
            show_router(shape)
        for quantization in (None,) if options.search or options.no_fp8 else (None, "fp8"):
            case = Case(shape, quantization)
            for tokens in asked:
                if options.search:
                    search(case, tokens, options.search)
                else:
                    show(case, tokens, bandwidth)
            if not options.search and quantization is None:
                show_parts(case, max(asked))
            del case
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
