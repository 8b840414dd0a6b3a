"""python -m bench.kernels.linear_chain: one token through all linears of a model, microseconds a layer.

As many layers as the model has, each with weights of its own, in one CUDA graph; with and without two
kernels between qkv and out that leave the memory idle, two and five microseconds, as rotation and
attention do. Varied: when a kernel lets the next one in, and how much that one asks for before its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bench.kernels.device import microseconds
from bench.kernels.linear_gpu import BF16, MODELS
from bench.kernels.linear_layers import random_weight
from bench.kernels.linear_prefetch import wait_rows
from kernels.launch import Launcher
from kernels.linear.launches import Extras, Kernels, Stored
from kernels.linear.plans import StreamPlan, few_plan

LINEARS = ("qkv", "out", "gate_up", "down")
Change = Callable[[str, StreamPlan], StreamPlan]


def as_planned(name: str, plan: StreamPlan) -> StreamPlan:
    return plan


def nothing_early(name: str, plan: StreamPlan) -> StreamPlan:
    return replace(plan, prefetch=0)


def late(name: str, plan: StreamPlan) -> StreamPlan:
    return replace(plan, late=True)


def late_before_idle(name: str, plan: StreamPlan) -> StreamPlan:
    return replace(plan, late=name in ("qkv", "down"))


def much_behind_idle(name: str, plan: StreamPlan) -> StreamPlan:
    return replace(plan, prefetch=4096, wave=1056) if name == "out" else plan


def all_behind_idle(name: str, plan: StreamPlan) -> StreamPlan:
    return replace(plan, prefetch=99999, wave=9999) if name == "out" else plan


def late_and_much(name: str, plan: StreamPlan) -> StreamPlan:
    return late_before_idle(name, all_behind_idle(name, plan))


def late_everywhere_and_much(name: str, plan: StreamPlan) -> StreamPlan:
    return late(name, all_behind_idle(name, plan))


CHANGES: tuple[Change, ...] = (
    as_planned,
    nothing_early,
    late,
    late_before_idle,
    much_behind_idle,
    all_behind_idle,
    late_and_much,
    late_everywhere_and_much,
)


class Chain:
    """All layers of a model."""

    def __init__(self, model: str) -> None:
        shapes = MODELS[model]
        self.sizes = {name: shapes[name][:2] for name in LINEARS}
        self.num_layers = shapes["qkv"][2]
        device = torch.device("cuda")
        self.weights = [
            {name: random_weight(*size) for name, size in self.sizes.items()}
            for _ in range(self.num_layers)
        ]
        self.kernels = {name: Kernels(size[0], device) for name, size in self.sizes.items()}
        self.wait = Launcher(wait_rows)
        self.waited = torch.zeros(64, device=device, dtype=torch.int32)
        hidden = self.sizes["qkv"][1]
        self.norm = torch.ones(hidden, device=device, dtype=BF16), 1e-5
        self.h = torch.randn(1, hidden, device=device, dtype=BF16)
        self.attended = torch.randn(1, self.sizes["out"][1], device=device, dtype=BF16)

    def layer(self, index: int, plans: dict[str, StreamPlan], idle: bool) -> None:
        h, norm = self.h, self.norm
        self._run(index, "qkv", plans, h, Extras(norm=norm))
        if idle:
            self.wait((16, 1, 1), (self.waited,), (2000,), ())
            self.wait((64, 1, 1), (self.waited,), (5000,), ())
        self._run(index, "out", plans, self.attended, Extras(residual=h))
        inner = self._run(index, "gate_up", plans, h, Extras(norm=norm, gated=True))
        self._run(index, "down", plans, inner, Extras(residual=h))

    def _run(
        self, index: int, name: str, plans: dict[str, StreamPlan], x: torch.Tensor, extras: Extras
    ) -> torch.Tensor:
        out = extras.residual
        if out is None:
            rows = self.sizes[name][0]
            out = x.new_empty((1, rows // 2 if extras.gated else rows))
        self.kernels[name].run(
            Stored(weight=self.weights[index][name]), x, out, extras, plans[name]
        )
        return out


def show(model: str) -> None:
    chain = Chain(model)
    num_bytes = sum(2 * rows * size for rows, size in chain.sizes.values())
    for idle in (False, True):
        for change in CHANGES:
            plans = {}
            for name, (rows, size) in chain.sizes.items():
                plan = few_plan(rows, size, 1, "plain")
                assert isinstance(plan, StreamPlan)
                plans[name] = change(name, plan)
            calls = [partial(chain.layer, index, plans, idle) for index in range(chain.num_layers)]
            took = microseconds(calls, rounds=9, at_least=16)
            print(
                f"{model} {'idle 2 + 5 us, ' if idle else ''}{change.__name__}: {took:.1f} us a layer "
                f"({num_bytes / (took - 7 * idle) / 1e6:.2f} TB/s but for the idle time)",
                flush=True,
            )


if __name__ == "__main__":
    for each in MODELS:
        show(each)
        torch.cuda.empty_cache()
