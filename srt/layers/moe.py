"""What a model says of its mixtures of experts; the formulas are in `kernels.moe`."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.moe import Routing as Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeArch:
    """`inner`: of one expert. `shared_inner`: of the MLP that every token passes, 0: there is none; with
    `routing.shared` it is taken as so many experts. `layers`: those with experts, the others have an
    MLP."""

    routing: Routing
    inner: int
    shared_inner: int
    layers: frozenset[int]

    @property
    def num_experts(self) -> int:
        """Whose weights are kept together."""
        return self.routing.num_experts + self.routing.shared
