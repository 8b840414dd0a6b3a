"""The part of a decoder layer that has experts, and its weight map."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.ops import Ops
from srt.layers.moe import MoeArch, route, run_experts
from srt.layers.parameters import Parameter, Part, Weights, linear
from srt.models.blocks import GatedMlp


class MoeBlock:
    """Stands where a `GatedMlp` would: [T, H] -> [T, H]."""

    __slots__ = ("routing", "router", "bias", "gate_up", "down", "shared")

    def __init__(self, weights: Weights, name: str, ops: Ops, moe: MoeArch) -> None:
        self.routing = moe.routing
        self.router = weights.tensors[f"{name}.router"]
        self.bias = weights.tensors.get(f"{name}.router_bias")
        count = moe.routing.num_experts
        gate_up, down = (weights.tensors[f"{name}.experts.{part}"] for part in ("gate_up", "down"))
        self.gate_up = gate_up.view(count, -1, gate_up.shape[1])
        self.down = down.view(count, -1, down.shape[1])
        self.shared = GatedMlp(weights, f"{name}.shared", ops) if moe.shared_inner else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x.float(), self.router.float())
        chosen = route(logits, self.routing, self.bias)
        out = run_experts(x, self.gate_up, self.down, *chosen)
        return out if self.shared is None else out + self.shared(x)


def moe_parameters(name: str, source: str, hidden: int, moe: MoeArch) -> list[Parameter]:
    """The weight map of a block whose tensors stand under `source`, in DeepSeek's names."""
    routing, inner = moe.routing, moe.inner
    count = routing.num_experts
    gate_up = [
        Part(source=f"{source}experts.{expert}.{module}.weight", shape=(inner, hidden))
        for expert in range(count)
        for module in ("gate_proj", "up_proj")
    ]
    down = [
        Part(source=f"{source}experts.{expert}.down_proj.weight", shape=(hidden, inner))
        for expert in range(count)
    ]
    router = Part(source=f"{source}gate.weight", shape=(count, hidden))
    found = [
        Parameter(name=f"{name}.router", kind="tensor", parts=(router,)),
        Parameter(name=f"{name}.experts.gate_up", kind="tensor", parts=tuple(gate_up)),
        Parameter(name=f"{name}.experts.down", kind="tensor", parts=tuple(down)),
    ]
    if routing.has_bias:
        bias = Part(source=f"{source}gate.e_score_correction_bias", shape=(count,))
        found.append(Parameter(name=f"{name}.router_bias", kind="exact", parts=(bias,)))
    if moe.shared_inner:
        shared, both = f"{source}shared_experts.", moe.shared_inner
        sizes = {"gate_proj": both, "up_proj": both}
        found += [
            linear(f"{name}.shared.gate_up", shared, sizes, hidden),
            linear(f"{name}.shared.down", shared, {"down_proj": hidden}, both),
        ]
    return found
