"""The merge on the GPU: a block per few heads, everything read and written once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher, next_power_of_two

if TYPE_CHECKING:
    from kernels.merge_state import MergeState

VALUES = 1024  # of a block


@triton.jit(do_not_specialize=["count"])
def merge_rows(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    count,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out: [count, DIM]; lse: [count]. grid: [count / ROWS]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    held = rows < count
    mask = held[:, None] & (columns < DIM)[None, :]
    places = rows.to(tl.int64)[:, None] * DIM + columns[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    lse_a = tl.load(lse_a_ptr + rows, mask=held, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + rows, mask=held, other=float("-inf"))
    peak = tl.maximum(lse_a, lse_b)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight_a = tl.exp(lse_a - peak)
    weight_b = tl.exp(lse_b - peak)
    total = weight_a + weight_b
    divisor = tl.where(total == 0, 1.0, total)
    out_a = tl.load(out_a_ptr + places, mask=mask & (weight_a > 0)[:, None], other=0.0)
    out_b = tl.load(out_b_ptr + places, mask=mask & (weight_b > 0)[:, None], other=0.0)
    sums = out_a.to(tl.float32) * weight_a[:, None] + out_b.to(tl.float32) * weight_b[:, None]
    tl.store(out_ptr + places, (sums / divisor[:, None]).to(out_a.dtype), mask=mask)
    lse = tl.where(total == 0, float("-inf"), peak + tl.log(divisor))
    tl.store(lse_ptr + rows, lse, mask=held)


def bind() -> MergeState:
    launch = Launcher(merge_rows)

    def merge_state(
        out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
        count, dim = lse_a.numel(), out_a.shape[2]
        if count and dim:
            block = next_power_of_two(dim)
            rows = max(VALUES // block, 1)
            tensors = (out_a, lse_a, out_b, lse_b, out, lse)
            launch((-(-count // rows), 1, 1), tensors, (count,), (dim, rows, block))
        return out, lse

    return merge_state
