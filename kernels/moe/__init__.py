"""A mixture of experts: a router gives every token a few of many small MLPs, and weighs what they make.

    s = softmax(x R^T) or sigmoid(x R^T)                    a score for every expert
    chosen = the top_k of s (+ bias), from the best groups only where experts come in groups
    w = scale * s of the chosen, divided by their sum where `renormalize` says so
    y = sum over the chosen of w_e * down_e(silu(gate_e(x)) * up_e(x))

The bias chooses, it does not weigh. Scores are computed in float32. A token's result does not depend on
its company but for the rounding of the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kernels.choice import check_shape, check_triton_layout, refuse_implementation, require_triton
from kernels.moe import reference
from kernels.moe.routing import Routing as Routing
from kernels.moe.stacked import Stacked as Stacked
from kernels.moe.stacked import stack as stack

if TYPE_CHECKING:
    import torch


class Route(Protocol):
    def __call__(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None, /
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Experts(Protocol):
    @property
    def bytes(self) -> int:
        """What the packed weights and their scales hold."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        residual: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """x: [T, H]; weights [T, k] float32 and experts [T, k] int32, of `Route`. Returns [T, H] in x's
        dtype; a residual [T, H] is added, written over and returned. Experts that are not packed here
        add nothing. Unchecked."""
        ...


@runtime_checkable
class FusedExperts(Experts, Protocol):
    """What the experts of implementation "triton" also do while entries are few."""

    def takes_norm(self, num_entries: int, /) -> bool:
        """Whether `normed` may be asked for so many tokens times experts of each."""
        ...

    def normed(
        self,
        stream: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weights: torch.Tensor,
        experts: torch.Tensor,
        /,
    ) -> torch.Tensor:
        """stream + self(rms_norm(stream, weight, eps)), written into `stream`. weight: [H]."""
        ...


class PackExperts(Protocol):
    def __call__(
        self, gate_up: Stacked, down: Stacked, first: int = 0, invariant: bool = False, /
    ) -> Experts: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeOps:
    """route: logits [T, E] float32 and a bias [E] float32 -> weights [T, k] float32 and experts [T, k]
    int32, best first, k being `Routing.each`. pack_experts: gate_up [E, 2 I, H], gates then ups, and
    down [E, H, I], of which it takes possession; the first of them is expert `first` of the router;
    `invariant`: a token's result must not depend, to the bit, on the tokens beside it."""

    route: Route
    pack_experts: PackExperts


def select(implementation: str) -> MoeOps:
    """The unchecked functions, for the hot path. What runs experts in C is torch."""
    match implementation:
        case "reference" | "torch" | "native":
            return MoeOps(route=reference.route, pack_experts=reference.PlainExperts)
        case "triton":
            require_triton()
            from kernels.moe import triton

            return triton.bind()
    refuse_implementation(implementation)


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    implementation: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] float32, bias [E] float32 -> weights [T, k] float32 and experts [T, k] int32."""
    check_shape("logits", logits, (None, routing.num_experts))
    if (bias is not None) != routing.has_bias:
        raise ValueError(f"routing.has_bias is {routing.has_bias}, and bias is {bias}")
    if bias is not None:
        check_shape("bias", bias, (routing.num_experts,))
    if routing.num_experts % routing.groups or not 0 < routing.top_groups <= routing.groups:
        raise ValueError(
            f"{routing.num_experts} experts cannot be chosen from {routing.top_groups} of "
            f"{routing.groups} groups"
        )
    if not 0 < routing.top_k <= routing.num_experts // routing.groups * routing.top_groups:
        raise ValueError(f"top_k must be at least 1 and at most what is allowed: {routing.top_k}")
    check_triton_layout(implementation, logits=logits, bias=bias)
    return select(implementation).route(logits, routing, bias)


def pack_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    quantization: str | None = None,
    first: int = 0,
    invariant: bool = False,
    implementation: str = "torch",
) -> Experts:
    """gate_up: [E, 2 I, H], gates then ups; down: [E, H, I]. Both may be written over."""
    check_shape("gate_up", gate_up, (None, None, None))
    count, both, hidden = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up must have an even number of rows, not {both}")
    check_shape("down", down, (count, hidden, both // 2))
    check_triton_layout(implementation, gate_up=gate_up, down=down)
    stacked = stack(gate_up.flatten(0, 1), count, quantization)
    stacked_down = stack(down.flatten(0, 1), count, quantization)
    return select(implementation).pack_experts(stacked, stacked_down, first, invariant)
