"""The part of a decoder layer that has experts, and its weight map."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.linear import FusedLinear, Linear
from kernels.moe import Experts, FusedExperts, Route, Routing
from kernels.ops import Ops
from kernels.rms_norm import RMSNorm
from srt.layers.moe import MoeArch
from srt.layers.parameters import Cut, Parameter, Part, Weights, linear
from srt.models.arch import Arch
from srt.models.blocks import GatedMlp, Mlp


class MoeBlock:
    """A `srt.models.blocks.Mlp`. Where ranks divide the experts among themselves, each adds what its own
    make."""

    __slots__ = ("routing", "router", "bias", "experts", "shared", "_route", "_rms_norm", "_fused")

    def __init__(self, weights: Weights, name: str, ops: Ops, moe: MoeArch) -> None:
        self.routing: Routing = moe.routing
        self.router: Linear = weights.linears[f"{name}.router"]
        self.bias = weights.tensors.get(f"{name}.router_bias")
        self.experts: Experts = weights.experts[name]
        is_apart = moe.shared_inner and not moe.routing.shared
        self.shared = GatedMlp(weights, f"{name}.shared", ops) if is_apart else None
        self._route: Route = ops.moe.route
        self._rms_norm: RMSNorm = ops.rms_norm
        self._fused: tuple[FusedLinear, FusedExperts] | None = None
        if isinstance(self.router, FusedLinear) and isinstance(self.experts, FusedExperts):
            self._fused = None if self.shared else (self.router, self.experts)

    @property
    def is_fused(self) -> bool:
        """Whether `add_normed` saves anything."""
        shared = self.shared is None or self.shared.is_fused
        return isinstance(self.router, FusedLinear) and shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self._route(self.router(x), self.routing, self.bias)
        shared = None if self.shared is None else self.shared(x)
        return self.experts(x, *chosen, shared)

    def add_normed(self, stream: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """stream + self(rms_norm(stream, weight, eps)); `stream` is written."""
        if self._fused is not None:
            router, experts = self._fused
            if experts.takes_norm(len(stream) * self.routing.each):
                logits = router.normed(stream, weight, eps)
                chosen = self._route(logits, self.routing, self.bias)
                return experts.normed(stream, weight, eps, *chosen)
        x = self._rms_norm(stream, weight, eps)
        chosen = self._route(self.router(x), self.routing, self.bias)
        if self.shared is not None:
            stream = self.shared.add(x, stream)
        return self.experts(x, *chosen, stream)


def build_mlp(arch: Arch, weights: Weights, name: str, ops: Ops, index: int) -> Mlp:
    """Of layer `index`, whose parameters stand under `name`."""
    if arch.moe is not None and index in arch.moe.layers:
        return MoeBlock(weights, name, ops, arch.moe)
    return GatedMlp(weights, name, ops)


def expert_parameters(
    name: str, sources: list[str], modules: tuple[str, str, str], hidden: int, inner: int
) -> list[Parameter]:
    """Of all experts, whose tensors stand under `sources`; `modules`: their gate, up and down."""
    gate, up, down = modules
    both = [
        Part(source=f"{source}{module}.weight", shape=(inner, hidden))
        for source in sources
        for module in (gate, up)
    ]
    back = [Part(source=f"{source}{down}.weight", shape=(hidden, inner)) for source in sources]
    return [
        Parameter(name=f"{name}.experts.gate_up", kind="experts", parts=tuple(both)),
        Parameter(name=f"{name}.experts.down", kind="experts", parts=tuple(back)),
    ]


def with_shared(
    experts: list[Parameter],
    source: str,
    modules: tuple[str, str, str],
    hidden: int,
    moe: MoeArch,
) -> list[Parameter]:
    """The experts, and behind them the MLP that all tokens pass, cut into as many as it is wide."""
    gate, up, down = modules
    inner, whole = moe.inner, moe.shared_inner
    cuts = [(inner * index, inner) for index in range(moe.routing.shared)]
    both = [
        Part(
            source=f"{source}{module}.weight",
            shape=(whole, hidden),
            cut=Cut(dim=0, first=first, size=size),
        )
        for first, size in cuts
        for module in (gate, up)
    ]
    back = [
        Part(
            source=f"{source}{down}.weight",
            shape=(hidden, whole),
            cut=Cut(dim=1, first=first, size=size),
        )
        for first, size in cuts
    ]
    return [
        replace(parameter, parts=(*parameter.parts, *more))
        for parameter, more in zip(experts, (both, back), strict=True)
    ]


def moe_parameters(name: str, source: str, hidden: int, moe: MoeArch) -> list[Parameter]:
    """The weight map of a block whose tensors stand under `source`, in DeepSeek's and Qwen's names."""
    routing, inner = moe.routing, moe.inner
    count = routing.num_experts
    sources = [f"{source}experts.{expert}." for expert in range(count)]
    modules = ("gate_proj", "up_proj", "down_proj")
    experts = expert_parameters(name, sources, modules, hidden, inner)
    if routing.shared:
        experts = with_shared(experts, f"{source}shared_experts.", modules, hidden, moe)
    found = [linear(f"{name}.router", source, {"gate": count}, hidden), *experts]
    if routing.has_bias:
        bias = Part(source=f"{source}gate.e_score_correction_bias", shape=(count,))
        found.append(Parameter(name=f"{name}.router_bias", kind="exact", parts=(bias,)))
    if moe.shared_inner and not routing.shared:
        shared, both = f"{source}shared_experts.", moe.shared_inner
        sizes = {"gate_proj": both, "up_proj": both}
        found += [
            linear(f"{name}.shared.gate_up", shared, sizes, hidden),
            linear(f"{name}.shared.down", shared, {"down_proj": hidden}, both),
        ]
    return found
