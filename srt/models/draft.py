"""Draft networks: what guesses for a target, and what it borrows from it.

A draft network is small because it has no embedding and often no output projection of its own. Its
forward is its own too, for it is fed what the target computed: the drafter that knows it calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernels.linear import Linear
from kernels.ops import Ops
from srt.errors import ConfigError
from srt.layers.parameters import Parameter, Weights
from srt.models.arch import Arch


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """What the target lends: frozen, and read only. `embedding` [V, H]; `head` [*, H] -> [*, V] float32;
    `head_rows`: the head's weights of these tokens, [N] int64 -> [N, H]."""

    num_layers: int
    hidden_size: int
    embedding: torch.Tensor
    head: Linear
    head_rows: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """What a network is built from. `config` is the draft's config.json; `stored` the names of the
    tensors in its checkpoint, empty if that is dummy: what is optional is used if it is there.
    `quantization`: of linears that are cut out of the target's."""

    arch: Arch
    config: dict[str, Any]
    stored: frozenset[str]
    quantization: str | None = None


class DraftFamily(Protocol):
    """Like `srt.models.blocks.Family`, for networks that lean on a target."""

    def parameters(self, source: DraftSource) -> list[Parameter]: ...

    def build(
        self,
        source: DraftSource,
        weights: Weights,
        ops: Ops,
        cos_sin: torch.Tensor,
        lent: Lent,
    ) -> object:
        """Raises ConfigError for a network that does not fit what is lent, with both numbers."""
        ...


def draft_family(algorithm: str | None) -> DraftFamily | None:
    """The network that an algorithm guesses with; None: a whole model, or none at all."""
    match algorithm:
        case "eagle3":
            from srt.models.eagle3 import Eagle3

            return Eagle3()
        case "dflash":
            from srt.models.dflash import Dflash

            return Dflash()
        case "dspark":
            from srt.models.dspark import Dspark

            return Dspark()
    return None


def check_width(source: DraftSource, lent: Lent, key: str = "target_hidden_size") -> int:
    """The width of the target's features as the draft expects it, which is the target's hidden size."""
    width = int(source.config.get(key, source.arch.hidden_size))
    if width != lent.hidden_size:
        raise ConfigError(
            f"the draft ({source.arch.name}) is made for a target of hidden size {width}; this target's "
            f"is {lent.hidden_size}"
        )
    return width
