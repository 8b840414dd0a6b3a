"""Draft networks: what guesses for a target, and what it borrows from it.

A draft network is small because it has no embedding and often no output projection of its own. Its
forward is its own too, for it is fed what the target computed: the drafter that knows it calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from kernels.linear import Linear
from kernels.ops import Ops
from srt.errors import ConfigError
from srt.layers.parameters import Parameter, Weights
from srt.models.arch import Arch
from srt.protocols.attention import AttentionBackend, AttentionBatch
from srt.protocols.kv_pool import KVPool


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


@runtime_checkable
class FeatureNetwork(Protocol):
    """What guesses from the target's features and its own states after them. T tokens, K of them kept,
    D tokens in the draft's vocabulary."""

    taps: tuple[int, ...]
    feature_size: int  # F, of all taps together
    token_ids: torch.Tensor | None  # [D] int64, of the target; None: all, in order

    @property
    def fuse(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """[T, F] -> [T, H]: features as states."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        attention: AttentionBackend,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """token_ids [T] int64 with their states [T, H]: fused features of the positions before, or what
        a forward before this one returned. Writes K and V of all tokens; returns the new states of
        those kept, [K, H]."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[K, H] -> [K, D] float32."""
        ...


def as_they_are(features: torch.Tensor) -> torch.Tensor:
    """The `fuse` of networks with one tap."""
    return features


def draft_family(algorithm: str | None, step: int | None = None) -> DraftFamily | None:
    """The network that an algorithm guesses with; None: a whole model, or none at all. `step`: which
    one, if it has one for each."""
    match algorithm:
        case "eagle":
            from srt.models.eagle import Eagle

            return Eagle()
        case "multi_layer":
            from srt.models.mtp import Mtp

            assert step is not None, "each layer has a runner of its own"
            return Mtp(step)
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
