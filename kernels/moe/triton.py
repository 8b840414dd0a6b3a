"""Router and experts on the GPU. Few tokens: a product per token and expert. More: the tokens of an
expert are brought together on the device, and nothing of it is read back; grids depend on the number of
tokens alone, so a step can be recorded.
"""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import Launcher, next_power_of_two, pdl_supported
from kernels.linear import quantize
from kernels.linear.gate import pair_rows
from kernels.moe import MoeOps
from kernels.moe.choose import choose_experts
from kernels.moe.few import down_few, gate_few
from kernels.moe.grouped import add_entries, multiply_blocks
from kernels.moe.large import multiply_tiles, stream_tiles
from kernels.moe.order import Sorter
from kernels.moe.plans import DownPlan, FetchPlan, FewPlan, GroupPlan, Plan, find_plan, fit, widen
from kernels.moe.routing import Routing
from kernels.moe.stacked import Stacked

FETCHED_BYTES = 128  # of a row, that the copy engine takes at once
Norm = tuple[torch.Tensor, float]  # weight [K] and eps
ADDED = 1024  # columns that are looked at together


class Kernels:
    """All of them, compiled as they are asked for; layers share them."""

    def __init__(self) -> None:
        self.quantize = quantize.bind()
        self.choose = Launcher(choose_experts)
        self.sort = Sorter()
        self.gate_few, self.down_few = Launcher(gate_few), Launcher(down_few)
        self.multiply, self.add = Launcher(multiply_blocks), Launcher(add_entries)


def bind() -> MoeOps:
    kernels = Kernels()

    def route(
        logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, each = logits.shape[0], routing.each
        weights = logits.new_empty((count, each))
        experts = logits.new_empty((count, each), dtype=torch.int32)
        if not count:
            return weights, experts
        size = routing.num_experts // routing.groups
        groups = (routing.groups, routing.top_groups)
        if routing.groups == routing.top_groups:
            groups, size = (1, 1), routing.num_experts
        powers = tuple(next_power_of_two(number) for number in (groups[0], size, each))
        how = (routing.scoring == "softmax", routing.renormalize, routing.forced_even)
        kernels.choose(
            (count, 1, 1),
            (logits, bias, weights, experts),
            (routing.scale,),
            (routing.num_experts, routing.top_k, routing.shared, *groups, *how, *powers),
            num_warps=1 if routing.num_experts <= 256 else 4,
        )
        return weights, experts

    def pack_experts(
        gate_up: Stacked, down: Stacked, first: int = 0, invariant: bool = False
    ) -> GroupedExperts:
        return GroupedExperts(gate_up, down, first, kernels, invariant=invariant)

    return MoeOps(route=route, pack_experts=pack_experts)


class GroupedExperts:
    """A `kernels.moe.FusedExperts`. The gates and ups it is given are brought together in place."""

    def __init__(
        self, gate_up: Stacked, down: Stacked, first: int, kernels: Kernels, *, invariant: bool
    ) -> None:
        order = pair_rows(gate_up.values.shape[1], gate_up.values.device)
        for held in (gate_up.values, gate_up.scales):
            if held is not None:
                pair_in_place(held, order)
        self._gate_up, self._down, self._first = gate_up, down, first
        self._kernels, self._invariant = kernels, invariant
        self._can_fetch = all(can_fetch(stacked.values) for stacked in (gate_up, down))
        self.bytes = gate_up.bytes + down.bytes

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.run(x, weights, experts, residual, self._find(experts.numel()))

    def _find(self, num_entries: int) -> Plan:
        return find_plan(
            num_entries,
            self._gate_up.values.shape[0],
            invariant=self._invariant,
            can_fetch=self._can_fetch,
            is_fp8=self._gate_up.scales is not None,
        )

    def takes_norm(self, num_entries: int) -> bool:
        return isinstance(self._find(num_entries).gate_up, FewPlan)

    def normed(
        self,
        stream: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weights: torch.Tensor,
        experts: torch.Tensor,
    ) -> torch.Tensor:
        plan = self._find(experts.numel())
        assert isinstance(plan.gate_up, FewPlan) and isinstance(plan.down, DownPlan)
        made = self._gate_few(stream, (weight, eps), experts, plan.gate_up)
        self._down_few(made, weights, experts, stream, stream, plan.down)
        return stream

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        residual: torch.Tensor | None,
        plan: Plan,
    ) -> torch.Tensor:
        """By a plan of one's own."""
        out = torch.empty_like(x) if residual is None else residual
        if not x.shape[0]:
            return out
        gate_up, down = plan.gate_up, plan.down
        if isinstance(gate_up, FewPlan) and isinstance(down, DownPlan):
            made = self._gate_few(x, None, experts, gate_up)
            self._down_few(made, weights, experts, residual, out, down)
        else:
            assert not isinstance(gate_up, FewPlan) and not isinstance(down, DownPlan)
            self._run_tiles(x, weights, experts, residual, out, plan.tile, gate_up, down)
        return out

    def _gate_few(
        self, x: torch.Tensor, norm: Norm | None, experts: torch.Tensor, plan: FewPlan
    ) -> torch.Tensor:
        """[entries, I]"""
        entries, top = experts.numel(), experts.shape[1]
        count, both, hidden = self._gate_up.values.shape
        plan = fit(plan, hidden)
        made = x.new_empty((entries, both // 2))
        weight, eps = norm or (None, 0.0)
        is_even = both % plan.rows == 0 and hidden % plan.block == 0
        self._kernels.gate_few(
            (-(-both // plan.rows), entries, 1),
            (x, weight, self._gate_up.values, self._gate_up.scales, experts, made),
            (both, self._first, count, eps),
            (top, hidden, plan.rows, plan.block, plan.stages, is_even),
            num_warps=plan.warps,
        )
        return made

    def _down_few(
        self,
        made: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        plan: DownPlan,
    ) -> None:
        """Right behind `_gate_few`: see `few.down_few`."""
        tokens, top = experts.shape
        count, hidden, inner = self._down.values.shape
        plan = widen(plan, inner)
        held = (self._down.values, self._down.scales, experts, weights)
        self._kernels.down_few(
            (-(-hidden // plan.rows), tokens, 1),
            (made, *held, residual, out),
            (hidden, self._first, count, top),
            (inner, plan.rows, plan.block),
            num_warps=plan.warps,
        )

    def _run_tiles(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        tile: int,
        gate_plan: GroupPlan,
        down_plan: GroupPlan,
    ) -> None:
        tokens, top = experts.shape
        count, both, hidden = self._gate_up.values.shape
        entries = tokens * top
        order, blocks = self._kernels.sort(experts, tile, self._first, count)
        gated = x.new_empty((entries, both // 2))
        self._multiply(x, self._gate_up, order, blocks, None, gated, top, tile, gate_plan)
        made = x.new_empty((entries, hidden))
        self._multiply(gated, self._down, order, blocks, weights, made, top, tile, down_plan)
        self._kernels.add(
            (tokens, -(-hidden // ADDED), 1),
            (made, experts, residual, out),
            (self._first, count),
            (hidden, top, ADDED),
        )

    def _multiply(
        self,
        x: torch.Tensor,
        stacked: Stacked,
        order: torch.Tensor,
        blocks: torch.Tensor,
        factors: torch.Tensor | None,
        out: torch.Tensor,
        top: int,
        tile: int,
        plan: GroupPlan,
    ) -> None:
        if isinstance(plan, FetchPlan):
            x_scales = None
            if stacked.scales is not None:
                x, x_scales = self._kernels.quantize(x, None)
            fetch_and_multiply(x, x_scales, stacked, order, blocks, factors, out, top, tile, plan)
            return
        _, rows, size = stacked.values.shape
        shape = (tile, plan.rows, plan.block, plan.stages, plan.swap)
        self._kernels.multiply(
            (-(-rows // plan.rows), blocks.shape[0], 1),
            (x, stacked.values, stacked.scales, order, blocks, factors, out),
            (rows,),
            (top, size, *shape, size % plan.block == 0, not x.is_cuda, factors is None),
            num_warps=plan.warps,
        )


def pair_in_place(held: torch.Tensor, order: torch.Tensor) -> None:
    """Rows of every expert, [E, N, ...], in this order; an expert at a time, as memory is dear."""
    if held.itemsize == 1:
        held = held.view(torch.uint8)  # a GPU does not gather what has 8 bits otherwise
    for expert in held:
        expert.copy_(expert[order])


def can_fetch(values: torch.Tensor) -> bool:
    """Whether the copy engine takes tiles of these weights."""
    is_narrow = values.dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    is_known = not values.is_cuda or pdl_supported(values.device)
    return is_narrow and is_known and values.shape[2] * values.itemsize % FETCHED_BYTES == 0


def fetch_and_multiply(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    stacked: Stacked,
    order: torch.Tensor,
    blocks: torch.Tensor,
    factors: torch.Tensor | None,
    out: torch.Tensor,
    top: int,
    tile: int,
    plan: FetchPlan,
) -> None:
    """Its kernel waits for the end of the one before as any does: what it saves is not a launch."""
    rows, size = stacked.values.shape[1:]
    weights = TensorDescriptor.from_tensor(stacked.values.flatten(0, 1), [plan.rows, plan.block])
    tiles = None
    if factors is not None:
        tiles = TensorDescriptor.from_tensor(x, [tile, plan.block])
    row_tiles, num_blocks = -(-rows // plan.rows), blocks.shape[0]
    places = (order, blocks, factors, out)
    given = (None if tiles else x, tiles, weights, x_scales, stacked.scales, *places)
    shape = (top, size, tile, plan.rows, plan.block, plan.stages, not x.is_cuda, factors is None)
    options = {"num_warps": plan.warps, "maxnreg": plan.registers or None}
    if plan.streams:
        programs = min(plan.streams * count_multiprocessors(x.device), row_tiles * num_blocks)
        stream_tiles[(programs,)](*given, num_blocks, rows, *shape, **options)
    else:
        multiply_tiles[(row_tiles, num_blocks)](*given, rows, *shape, **options)


def count_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # interpreted; so few that each has several tiles
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
