"""An attention backend: plan once per batch, run once per layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from srt.protocols.kv_pool import KVPool


@dataclass(slots=True, kw_only=True)
class AttentionBatch:
    """The step's geometry on the device. S slices, T tokens; decode slices come first.

    page_table: [max_rows, max_pages] int32. rows, starts, lengths: [S] int32 tensors; `*_host` are the
    same numbers as lists, so that nothing needs a device sync. slots: [T] int64, where each token's K
    and V go. positions: [T] int64.

    Slices are causal: a token sees its row's keys up to its own. Where `bases` [S] int32 is given and
    not -1, the slice's tokens see the keys in slots before that base, and those at base + j for which
    bit j of `visible` [T] int64 is set; both are None if no slice has a window.

    `is_settled`: the batch is recorded, and nothing in its graph writes its rows, starts, page table or
    the keys before each start: they may be read before the kernels in front have finished.
    """

    num_decode: int  # the first num_decode slices have length 1
    page_size: int
    page_table: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    rows_host: list[int]
    starts_host: list[int]
    lengths_host: list[int]
    slots: torch.Tensor
    positions: torch.Tensor
    bases: torch.Tensor | None = None
    bases_host: list[int] = field(default_factory=list)
    visible: torch.Tensor | None = None
    is_settled: bool = False


class Attention(Protocol):
    """What a layer calls. `wants_new`: `forward` of this step makes use of `new`."""

    wants_new: bool

    def forward(
        self,
        q: torch.Tensor,
        layer: int,
        pool: KVPool,
        *,
        scale: float,
        window: int | None,
        cap: float | None = None,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """q: [T, q_heads, head_dim]; this step's K and V are already in the pool. Returns
        [T, q_heads, head_dim]. Causal; `window` limits how far back a token sees, itself included.
        `cap`: a score s becomes cap * tanh(s / cap). `new`: this step's K and V once more, as they are
        in the pool, [T, kv_heads, head_dim] each, rows any stride apart."""
        ...


class AttentionBackend(Attention, Protocol):
    """Built after the runner's (prefill, decode) pair is stamped; may read the stamp.

    A step runs eagerly: `plan`, then `forward` once per layer. Or it is a recorded CUDA graph: `capture`
    before it is recorded, `forward` while it is, then `replay` before each time it is played.
    """

    name: str

    def plan(self, batch: AttentionBatch) -> None:
        """Once per step, before the first layer. Keeps what `forward` needs until the next plan."""
        ...

    def capture(self, batch: AttentionBatch) -> None:
        """Before decode slices are recorded: `rows`, `starts` and `page_table` are static, and what they
        hold is read anew at every replay. Takes the place of `plan`. Slices of one length, more than
        one token each, can be recorded too where `has_graph` backends say so: `num_decode` is 0 then."""
        ...

    def replay(self, batch: AttentionBatch) -> None:
        """Before the graph of this batch's size is played: its tensors hold the new step's numbers, and
        so do `rows_host` and `starts_host`."""
        ...
