"""One rank's share of a model: what it keeps of each checkpoint tensor, and linears of which each rank
has a share.

    heads       qkv: whole heads; where KV heads are fewer than ranks, several ranks keep the same one
                q_up, kv_up: the same, of what makes heads of a latent
    queries     whole heads of the first part; the latent behind it belongs to all heads
    column      gate_up: outputs; nothing is exchanged
    row         out, down: inputs, those that the rank's own heads or columns made; the results add up
    experts     whole experts: each rank adds what its own make; the results add up
    vocabulary  head: tokens; every rank gets all logits, and draws the same tokens from them

So there is an exchange twice in a layer and once in a step. The rest is whole on every rank, the
embedding too: to divide it would cost one more exchange in every step, drafts borrow it, and a packed
head that is tied to it has no rows to look up.

int8: scales are by output channel, so dividing columns before or after quantizing is the same. A share
of rows has scales of its own, over fewer inputs, so they are finer than the whole's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kernels.linear import AddingLinear, Linear
from kernels.linear.quantized import QuantizedWeight
from kernels.moe import Experts, PackExperts, stack
from srt.layers.parameters import Cut, Parameter, Part, sharding_of
from srt.parallel.group import Group


def shard(parameters: list[Parameter], head_dim: int, group: Group) -> list[Parameter]:
    """The parameters with the cuts of the group's own rank; `rules_parallel` refused what does not
    divide."""
    if group.size == 1:
        return parameters
    return [_shard(parameter, head_dim, group) for parameter in parameters]


def _shard(parameter: Parameter, head_dim: int, group: Group) -> Parameter:
    if parameter.sharding == "experts":
        return _own_experts(parameter, group)

    def cut(part: Part) -> Part:
        match parameter.sharding:
            case "heads":
                return replace(part, cut=_rows(part, parameter.rows_of_head or head_dim, group))
            case "queries" if part is parameter.parts[0]:
                return replace(part, cut=_rows(part, head_dim, group))
            case "column":
                return replace(part, cut=_rows(part, 1, group))
            case "vocabulary":
                each = rows_of_rank(part.shape[0], group.size)
                first = min(each * group.rank, part.shape[0])
                size = min(each, part.shape[0] - first)
                return replace(part, cut=Cut(dim=0, first=first, size=size))
            case "row" if len(part.shape) == 2:
                size, rest = divmod(part.shape[1], group.size)
                assert not rest, part
                return replace(part, cut=Cut(dim=1, first=size * group.rank, size=size))
        return part

    return replace(
        parameter,
        parts=tuple(cut(part) for part in parameter.parts),
        biases=tuple(cut(part) for part in parameter.biases),
    )


def _own_experts(parameter: Parameter, group: Group) -> Parameter:
    """Of the others' nothing is kept."""
    each, rest = divmod(len(parameter.parts), group.size)
    assert not rest, parameter.name
    mine = range(each * group.rank, each * (group.rank + 1))
    nothing = Cut(dim=0, first=0, size=0)
    parts = [
        part if index in mine else replace(part, cut=nothing)
        for index, part in enumerate(parameter.parts)
    ]
    return replace(parameter, parts=tuple(parts))


def _rows(part: Part, unit: int, group: Group) -> Cut:
    """Whole units of rows, or the one unit that this rank has together with others."""
    count, rest = divmod(part.shape[0], unit)
    assert not rest, part
    if count >= group.size:
        assert count % group.size == 0, part
        size = count // group.size * unit
        return Cut(dim=0, first=size * group.rank, size=size)
    assert group.size % count == 0, part
    return Cut(dim=0, first=count * group.rank // group.size * unit, size=unit)


def rows_of_rank(num_rows: int, size: int) -> int:
    """Of a vocabulary: every rank has this many, the last one's last ones may be padding."""
    return -(-num_rows // size)


Pack = Callable[[torch.Tensor | QuantizedWeight, torch.Tensor | None], Linear]


def pack_share(
    name: str,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    pack: Pack,
    group: Group,
    vocab_size: int,
) -> Linear:
    """The linear that gives every rank what the whole one gives, or its own columns of that, made of the
    rank's share of weight and bias."""
    sharding = None if group.size == 1 else sharding_of(name)
    if sharding == "row":
        share = pack(weight, bias if group.rank == 0 else None)
        if isinstance(share, AddingLinear):
            return AddingRowParallel(share, group)
        return RowParallel(share, group)
    if sharding == "vocabulary":
        assert bias is None and isinstance(weight, torch.Tensor), name
        missing = rows_of_rank(vocab_size, group.size) - weight.shape[0]
        if missing:
            weight = torch.nn.functional.pad(weight, (0, 0, 0, missing))
        return VocabularyParallel(pack(weight, None), vocab_size, group)
    return pack(weight, bias)


def pack_own_experts(
    gate_up: torch.Tensor | QuantizedWeight,
    down: torch.Tensor | QuantizedWeight,
    num_experts: int,
    quantization: str | None,
    pack: PackExperts,
    group: Group,
    *,
    invariant: bool = False,
) -> Experts:
    """Of the rank's share of the stacks: what gives every rank what all `num_experts` make together."""
    count = num_experts // group.size
    stacked = stack(gate_up, count, quantization)
    share = pack(stacked, stack(down, count, quantization), count * group.rank, invariant)
    return share if group.size == 1 else ExpertParallel(share, group)


class RowParallel:
    """Each rank multiplies its inputs; the results add up."""

    __slots__ = ("_share", "_add")

    def __init__(self, share: Linear, group: Group) -> None:
        self._share = share
        self._add = group.add

    @property
    def bytes(self) -> int:
        return self._share.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._add(self._share(x))


class AddingRowParallel(RowParallel):
    """A `kernels.linear.AddingLinear`: rank 0's share takes in what is added to the sum."""

    __slots__ = ("_is_first",)
    _share: AddingLinear

    def __init__(self, share: AddingLinear, group: Group) -> None:
        super().__init__(share, group)
        self._is_first = group.rank == 0

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._add(self._share.added(x, residual) if self._is_first else self._share(x))


class ExpertParallel:
    """A `kernels.moe.Experts`: each rank asks its own; what they make adds up."""

    __slots__ = ("_share", "_add")

    def __init__(self, share: Experts, group: Group) -> None:
        self._share = share
        self._add = group.add

    @property
    def bytes(self) -> int:
        return self._share.bytes

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        made = self._add(self._share(x, weights, experts))
        return made if residual is None else residual.add_(made)


class VocabularyParallel:
    """Each rank computes the logits of its tokens; all get all of them."""

    __slots__ = ("_share", "_vocab_size", "_join")

    def __init__(self, share: Linear, vocab_size: int, group: Group) -> None:
        self._share = share
        self._vocab_size = vocab_size
        self._join = group.join

    @property
    def bytes(self) -> int:
        return self._share.bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = self._join(self._share(x))
        if logits.shape[1] == self._vocab_size:
            return logits
        return logits[:, : self._vocab_size].contiguous()
