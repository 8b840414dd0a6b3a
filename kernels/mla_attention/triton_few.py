"""The products around absorbed MLA for a few tokens: each launch asks for its weights before the kernel
before it has finished, and the parts that programs left are joined where they are used.

Letters: D the rank, C some columns of what is made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher
from kernels.mla_attention.triton import Work
from kernels.mla_attention.triton_join import join

MOST_TOKENS = 8
ABSORB_COLUMNS = 128
RELEASE_COLUMNS = 32
AT_ONCE = 16


@triton.jit
def absorb_row(
    q_ptr,
    keys_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    Q_HEAD: tl.constexpr,
    KEYS_HEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [tokens * HEADS, RANK / COLUMNS]. keys: [HEADS, NOPE, RANK], heads KEYS_HEAD apart."""
    place = tl.program_id(0)
    head = place % HEADS
    n = tl.arange(0, NOPE)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weights = tl.load(keys_ptr + head * KEYS_HEAD + n[:, None] * RANK + columns[None, :])
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    q = tl.load(q_ptr + (place // HEADS) * Q_STRIDE + head * Q_HEAD + n).to(tl.float32)
    made = tl.sum(weights.to(tl.float32) * q[:, None], 0)
    tl.store(out_ptr + place * RANK + columns, made.to(out_ptr.dtype.element_ty))


@triton.jit
def release_row(
    sums_ptr,
    parts_ptr,
    ends_ptr,
    values_ptr,
    out_ptr,
    splits,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUES_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SPLIT: tl.constexpr,
    LENGTH: tl.constexpr,
    PER_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [tokens * HEADS, VALUE / COLUMNS]. values: [HEADS, VALUE, RANK], heads VALUES_HEAD apart.
    SPLIT: what to release is in the parts, see `triton_kernel.attend`, else in sums [tokens, HEADS,
    RANK]."""
    place = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, RANK)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = values_ptr + (place % HEADS) * VALUES_HEAD + columns[:, None] * RANK + d[None, :]
    weights = tl.load(at)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if SPLIT:
        latent = join(
            parts_ptr + place * splits * (RANK + 2), ends_ptr, place // HEADS, d, splits,
            RANK, BLOCK, LEAST, RANK, AT_ONCE, LENGTH, PER_TILE,
        )  # fmt: skip
    else:
        latent = tl.load(sums_ptr + place * RANK + d).to(tl.float32)
    made = tl.sum(weights.to(tl.float32) * latent[None, :], 1)
    tl.store(out_ptr + place * VALUE + columns, made.to(out_ptr.dtype.element_ty))


class FewTokens:
    """Launches both."""

    def __init__(self) -> None:
        self._absorb = Launcher(absorb_row)
        self._release = Launcher(release_row)

    def absorb(self, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """q [n, heads, nope + rope], keys [heads, nope, rank] -> [n, heads, rank]."""
        tokens, heads, query = q.shape
        _, nope, rank = keys.shape
        assert q.stride(1) == query and keys.stride(1) == rank
        out = torch.empty((tokens, heads, rank), dtype=q.dtype, device=q.device)
        columns = min(ABSORB_COLUMNS, rank)
        self._absorb(
            (tokens * heads, rank // columns, 1),
            (q, keys, out),
            (),
            (heads, nope, rank, q.stride(0), query, keys.stride(0), columns),
        )
        return out

    def release(
        self,
        sums: torch.Tensor,
        parts: torch.Tensor | None,
        values: torch.Tensor,
        work: Work,
    ) -> torch.Tensor:
        """sums or parts as `LatentAttention.run` leaves them of `work`; values [heads, rank, value],
        transposed -> [n, heads, value]."""
        tokens, heads, rank = sums.shape
        value = values.shape[2]
        assert values.stride(1) == 1 and values.stride(2) == rank
        out = torch.empty((tokens, heads, value), dtype=sums.dtype, device=sums.device)
        columns = min(RELEASE_COLUMNS, value)
        self._release(
            (tokens * heads, value // columns, 1),
            (sums, parts, work.cut_by, values, out),
            (work.splits,),
            (
                heads,
                rank,
                value,
                values.stride(0),
                work.shape.block,
                work.shape.least,
                columns,
                AT_ONCE,
                parts is not None,
                work.length,
                work.shape.per_tile(heads),
            ),
        )
        return out
