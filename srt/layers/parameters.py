"""What a model is made of, declared before a byte is read: a model's `parameters` is its weight map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

from kernels.linear import Linear
from kernels.linear.quantized import QuantizedWeight
from kernels.moe import Experts

ParameterKind = Literal["tensor", "norm", "linear", "index", "exact", "experts"]
Sharding = Literal["heads", "queries", "column", "row", "vocabulary", "experts"]

# What several ranks divide among themselves, by the last word of its name, and how:
# `srt.layers.sharding`.
SHARDED: Mapping[str, Sharding] = MappingProxyType(
    {
        "qkv": "heads",
        "q_up": "heads",
        "kv_up": "heads",
        "queries": "queries",
        "gate_up": "column",
        "out": "row",
        "down": "row",
        "head": "vocabulary",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What is kept of a tensor: `size` entries of dimension `dim`, from `first` on."""

    dim: int
    first: int
    size: int

    def of(self, value: torch.Tensor | QuantizedWeight) -> torch.Tensor | QuantizedWeight:
        return value.narrow(self.dim, self.first, self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One checkpoint tensor, under its Hugging Face name, as it must be shaped there; and what of it is
    kept, None: all."""

    source: str
    shape: tuple[int, ...]
    cut: Cut | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tensor of the running model: its parts, stacked along rows in this order.

    A linear has weights [out, in] and may have biases [out]; it is packed as soon as its last part has
    arrived, so a fused linear never exists twice. An index keeps its integers, an
    exact tensor the type it is stored in. Experts are two parameters, `x.experts.gate_up` (a gate and an
    up, expert after expert) and `x.experts.down`, which are packed together.
    """

    name: str
    kind: ParameterKind
    parts: tuple[Part, ...]
    biases: tuple[Part, ...] = ()
    rows_of_head: int | None = None  # where they are not as many as a query has channels

    @property
    def sharding(self) -> Sharding | None:
        """How ranks divide it; None: each has all of it."""
        if self.kind == "experts":
            return "experts"
        return sharding_of(self.name) if self.kind in ("linear", "tensor") else None


@dataclass(frozen=True, slots=True)
class Weights:
    """A filled model: every declared parameter once, under its own name; experts under what their two
    names begin with."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    linears: dict[str, Linear] = field(default_factory=dict)
    experts: dict[str, Experts] = field(default_factory=dict)  # x


def sharding_of(linear: str) -> Sharding | None:
    """By the linear's name."""
    return SHARDED.get(linear.rpartition(".")[2])


def tensor(name: str, source: str, *shape: int) -> Parameter:
    return Parameter(name=name, kind="tensor", parts=(Part(source=source, shape=shape),))


def norm(name: str, source: str, size: int) -> Parameter:
    """A norm's scale, [size]."""
    return Parameter(name=name, kind="norm", parts=(Part(source=source, shape=(size,)),))


def linear(
    name: str, prefix: str, outputs: dict[str, int], inputs: int, *, bias: bool = False
) -> Parameter:
    """`outputs`: module name under `prefix` and its number of rows, in the order they are stacked."""
    return Parameter(
        name=name,
        kind="linear",
        parts=tuple(
            Part(source=f"{prefix}{module}.weight", shape=(rows, inputs))
            for module, rows in outputs.items()
        ),
        biases=tuple(
            Part(source=f"{prefix}{module}.bias", shape=(rows,))
            for module, rows in outputs.items()
            if bias
        ),
    )


def head(name: str, embedding: str, vocab_size: int, hidden_size: int, *, tied: bool) -> Parameter:
    """The output projection; a tied one is filled from the embedding's tensor."""
    source = embedding if tied else "lm_head.weight"
    part = Part(source=source, shape=(vocab_size, hidden_size))
    return Parameter(name=name, kind="linear", parts=(part,))
