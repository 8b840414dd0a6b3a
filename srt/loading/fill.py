"""Puts checkpoint tensors where the model wants them: each exactly once, or the load fails by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from kernels.linear import Linear
from kernels.linear.quantized import QuantizedWeight, stack_rows
from kernels.moe import Experts
from srt.errors import ConfigError
from srt.layers.parameters import Cut, Parameter, Part, Weights

Value = torch.Tensor | QuantizedWeight
Pack = Callable[[str, Value, torch.Tensor | None], Linear]
PackExperts = Callable[[str, Value, Value], Experts]
NamedTensors = Iterable[tuple[str, Value]]

SHOWN = 5  # names listed in an error before "and N more"


@dataclass(slots=True)
class _Pending:
    """A parameter some of whose parts have arrived."""

    parameter: Parameter
    arrived: dict[Part, Value] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.arrived) == len(self.parameter.parts) + len(self.parameter.biases)

    def stack(self, parts: tuple[Part, ...]) -> Value | None:
        values = [self.arrived.pop(part) for part in parts]
        return stack_rows(values) if values else None


def fill(
    parameters: list[Parameter],
    checkpoint: NamedTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
    pack: Pack,
    origin: str,
    pack_experts: PackExperts | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Weights:
    """Consumes `checkpoint`, converts each tensor to `dtype` and packs linears as they complete, so
    memory stays at the model plus one parameter. Of a part with a cut only that is converted, and of a
    tensor that is mapped rather than read only that comes from the disk.

    Linears may come quantized, see `srt.loading.quantized`; they are not converted.

    `pack(name, weight [out, in], bias [out] or None)` takes ownership, as does `pack_experts(name,
    gate_up [E 2 I, H], down [E H, I])`, for a model that has experts. Raises ConfigError naming the
    tensor that is unknown, missing, there twice, or of the wrong shape (with both shapes).
    """
    wanted = _destinations(parameters)
    seen: set[str] = set()
    weights = Weights()
    halves: dict[str, Value] = {}
    for source, given in checkpoint:
        if source not in wanted:
            raise ConfigError(f"{origin}: tensor {source!r} belongs to no parameter of this model")
        if source in seen:
            raise ConfigError(f"{origin}: tensor {source!r} is there twice")
        seen.add(source)
        keeps_type = wanted[source][0][0].parameter.kind in ("index", "exact")
        kept: dict[Cut | None, Value] = {}
        for pending, part in wanted[source]:
            if tuple(given.shape) != part.shape:
                raise ConfigError(
                    f"{origin}: tensor {source!r} has shape {list(given.shape)}; "
                    f"the model's configuration asks for {list(part.shape)}"
                )
            is_experts = pending.parameter.kind == "experts"
            if part.cut not in kept:
                share = given if part.cut is None else part.cut.of(given)
                moved = share.to(device=device, dtype=None if keeps_type else dtype)
                whole = moved.contiguous()
                if isinstance(whole, torch.Tensor) and whole.dim() == 3 and is_experts:
                    whole = whole.flatten(0, 1)  # several experts in one tensor
                kept[part.cut] = whole
            pending.arrived[part] = kept[part.cut]
            if pending.is_complete:
                if is_experts:
                    _finish_experts(pending, halves, weights, pack_experts)
                else:
                    _finish(pending, weights, pack)
        progress(len(seen) / len(wanted))
    missing = sorted(wanted.keys() - seen)
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise ConfigError(f"{origin}: missing tensors: {', '.join(missing[:SHOWN])}{more}")
    return weights


def _destinations(parameters: list[Parameter]) -> dict[str, list[tuple[_Pending, Part]]]:
    wanted: dict[str, list[tuple[_Pending, Part]]] = {}
    for parameter in parameters:
        pending = _Pending(parameter)
        for part in (*parameter.parts, *parameter.biases):
            wanted.setdefault(part.source, []).append((pending, part))
    return wanted


def _finish(pending: _Pending, weights: Weights, pack: Pack) -> None:
    parameter = pending.parameter
    value, bias = pending.stack(parameter.parts), pending.stack(parameter.biases)
    assert value is not None and not isinstance(bias, QuantizedWeight), parameter.name
    if parameter.kind == "linear":
        weights.linears[parameter.name] = pack(parameter.name, value, bias)
    else:
        assert isinstance(value, torch.Tensor), parameter.name
        weights.tensors[parameter.name] = value.contiguous()


def _finish_experts(
    pending: _Pending,
    halves: dict[str, Value],
    weights: Weights,
    pack: PackExperts | None,
) -> None:
    """Packs both stacks when the second of them is there; `halves` has the others'."""
    name, value = pending.parameter.name, pending.stack(pending.parameter.parts)
    assert pack is not None and value is not None, name
    halves[name] = value
    owner = name.removesuffix(".gate_up").removesuffix(".down")
    if f"{owner}.gate_up" in halves and f"{owner}.down" in halves:
        both = halves.pop(f"{owner}.gate_up"), halves.pop(f"{owner}.down")
        owner = owner.removesuffix(".experts")
        weights.experts[owner] = pack(owner, *both)
