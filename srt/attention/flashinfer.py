"""Attention by FlashInfer's wrappers: long slices by its prefill (FA3 on Hopper), decodes by its
tensor-core decode. No windows, caps or trees: the capability table says so.

It is faster on keys that lie side by side: those of a step that begins its rows do, fresh from the
rotation; for many queries on not many more keys it is worth a copy. A cache of 8 bits is not read where
it is at all: its numbers are brought into the queries' type with the copy.

A wrapper's plan wants what only `forward` knows (heads, scale), so it is made in the first forward after
`plan`. A plan leaves by an asynchronous copy out of pinned memory of the wrapper, so a wrapper plans
again only after the copy of its last plan is through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from srt.attention.flashinfer_operator import kernel_of
from srt.attention.flashinfer_plan import (
    KeysForm,
    Planned,
    Shape,
    list_slots,
    plan_decode,
    plan_prefill,
)
from srt.protocols.attention import AttentionBatch
from srt.protocols.kv_pool import KVPool

WORKSPACE_BYTES = 256 << 20
LEAST_QUERIES = 2048  # of a step whose keys are gathered
LEAST_NARROW = 128  # the same for a cache of 8 bits
MOST_KEYS = 32768
KEYS_PER_QUERY = 4


@dataclass(slots=True)
class Gathered:
    """Room for the keys of a step, used by one layer after the other. slots: [N] int64."""

    slots: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class FlashInferAttention:
    """Eager steps take turns on two wrappers of each kind; each recorded batch size has its own.

    `gathers`: whether keys may be brought side by side, which needs Triton. `narrow`: the cache has 8
    bits; it gets only slices that it `takes`, and no decodes."""

    name = "flashinfer"

    def __init__(self, *, gathers: bool = True, narrow: bool = False) -> None:
        assert gathers or not narrow
        self.wants_new = False
        self._may_gather = gathers
        self._narrow = narrow
        self._gather: Any = None
        self._workspace: torch.Tensor | None = None
        self._pairs: dict[str, list[Planned]] = {}
        self._recorded: dict[int, Planned] = {}
        self._batch: AttentionBatch | None = None
        self._is_recording = False
        self._shape: Shape | None = None  # what this step is planned for, if it is
        self._prefill: Planned | None = None
        self._decode: Planned | None = None
        self._form: KeysForm = "paged"
        self._gathered: Gathered | None = None
        self._pool: KVPool | None = None
        self._pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the planes, page by page

    def takes(self, starts: list[int], lengths: list[int]) -> bool:
        """Whether its keys are worth the copy, and have room. Asked for a cache of 8 bits."""
        queries = sum(lengths)
        return not any(starts) or (queries >= LEAST_NARROW and queries + sum(starts) <= MOST_KEYS)

    def plan(self, batch: AttentionBatch) -> None:
        self._open(batch.page_table.device)
        self._batch, self._is_recording, self._shape = batch, False, None
        self._prefill = self._decode = None
        rest = batch.starts_host[batch.num_decode :]
        self.wants_new = bool(rest) and not any(rest)  # what it attends to is what is new

    def capture(self, batch: AttentionBatch) -> None:
        """The first forward from here on plans, so it must run before the recording begins."""
        self.plan(batch)
        self._is_recording, self.wants_new = True, False
        size = len(batch.rows_host)
        if size not in self._recorded:
            self._recorded[size] = Planned(self._new_decode(batch, size))

    def replay(self, batch: AttentionBatch) -> None:
        planned = self._recorded[len(batch.rows_host)]
        assert planned.shape is not None, "replay before the graph was recorded"
        plan_decode(planned, planned.shape, batch)

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
        batch = self._batch
        assert batch is not None, "forward before plan"
        assert window is None and cap is None and batch.bases is None, (
            "the capability table says so"
        )
        shape = self._shape
        if shape is None or shape.scale != scale or shape.heads != q.shape[1]:
            shape = _shape_of(q, pool.keys(layer), batch.page_size, scale)
            self._prepare(batch, shape, has_new=new is not None and self.wants_new)
        count = batch.num_decode
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._decode is not None:
            planes = self._planes(layer, pool)
            self._decode.wrapper.run(q[:count], planes, out=out[:count])
        if self._prefill is None:
            return out
        q, rest = (q[count:], out[count:]) if count else (q, out)
        if self._form == "paged":
            self._prefill.wrapper.run(q, self._planes(layer, pool), out=rest)
        else:
            self._prefill.wrapper.run(q, *self._side_by_side(layer, pool, new, count), out=rest)
        return out

    def _side_by_side(
        self,
        layer: int,
        pool: KVPool,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        count: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of the slices that are no decodes."""
        gathered = self._gathered
        if gathered is None:
            assert new is not None, "the layers before brought theirs"
            return (new[0][count:], new[1][count:]) if count else new
        self._gather(
            pool.keys(layer),
            pool.values(layer),
            gathered.slots,
            gathered.k,
            gathered.v,
            pool.k_scale(layer),
            pool.v_scale(layer),
        )
        return gathered.k, gathered.v

    def _planes(self, layer: int, pool: KVPool) -> tuple[torch.Tensor, torch.Tensor]:
        if pool is not self._pool:
            self._pool, self._pages = pool, {}
        if layer not in self._pages:
            k, v = pool.keys(layer), pool.values(layer)
            paged = (-1, pool.page_size, *k.shape[1:])
            self._pages[layer] = k.view(paged), v.view(paged)
        return self._pages[layer]

    def _prepare(self, batch: AttentionBatch, shape: Shape, *, has_new: bool) -> None:
        self._shape = shape
        count = batch.num_decode
        if self._is_recording:
            planned = self._decode = self._recorded[count]
            if planned.shape != shape:
                plan_decode(planned, shape, batch)
            return
        if count:
            self._decode = self._turn("decode")
            plan_decode(self._decode, shape, batch)
        if len(batch.rows_host) > count:
            is_gathered = not has_new and (self._narrow or self._is_worth_gathering(batch))
            self._form = "ragged" if has_new or is_gathered else "paged"
            self._prefill = self._turn(self._form)
            ends = plan_prefill(self._prefill, shape, batch, self._form)
            self._gathered = None
            if is_gathered:
                slots = list_slots(batch, slice(count, None), ends)
                self._gathered = self._room(slots, shape)

    def _is_worth_gathering(self, batch: AttentionBatch) -> bool:
        if self._gather is None:
            return False
        queries = sum(batch.lengths_host[batch.num_decode :])
        keys = queries + sum(batch.starts_host[batch.num_decode :])
        return queries >= LEAST_QUERIES and keys <= min(KEYS_PER_QUERY * queries, MOST_KEYS)

    def _room(self, slots: torch.Tensor, shape: Shape) -> Gathered:
        size = (len(slots), shape.num_kv, shape.dim)
        k, v = (torch.empty(size, dtype=shape.kv_dtype, device=slots.device) for _ in range(2))
        return Gathered(slots, k, v)

    def _turn(self, kind: str) -> Planned:
        """The wrapper of this kind that was not used last."""
        self._pairs[kind].reverse()
        return self._pairs[kind][0]

    def _open(self, device: torch.device) -> None:
        if self._workspace is not None:
            return
        import flashinfer

        space = self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        kernel = kernel_of(device)
        for _ in range(2):
            for kind, wrapper in (
                ("paged", flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, backend=kernel)),
                ("ragged", flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, backend=kernel)),
                (
                    "decode",
                    flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, use_tensor_cores=True),
                ),
            ):
                self._pairs.setdefault(kind, []).append(Planned(wrapper))
        if self._may_gather:
            from kernels.paged_attention.triton_gather import Gather

            self._gather = Gather()

    def _new_decode(self, batch: AttentionBatch, size: int) -> Any:
        import flashinfer

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=batch.page_table.device)

        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=ints(size + 1),
            paged_kv_indices_buffer=ints(size * batch.page_table.shape[1]),
            paged_kv_last_page_len_buffer=ints(size),
        )


def _shape_of(q: torch.Tensor, k_plane: torch.Tensor, page_size: int, scale: float) -> Shape:
    return Shape(
        heads=q.shape[1],
        num_kv=k_plane.shape[1],
        dim=q.shape[2],
        page_size=page_size,
        scale=scale,
        dtype=q.dtype,
        kv_dtype=k_plane.dtype if k_plane.dtype.itemsize > 1 else q.dtype,
    )
