"""RMS norm on the GPU: a block per row, which stays in registers from its load to its store.

float32 inside, rounded once, like the reference. How a row is summed depends on its length alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher, next_power_of_two

if TYPE_CHECKING:
    from kernels.rms_norm import Norms

VALUES_PER_THREAD = 8  # one load of 16 bytes in bfloat16
MAX_WARPS = 16


@triton.jit
def norm_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """x, residual, out: [T, SIZE], grid [T]. ADD: the residual becomes x + residual, and is normed."""
    columns = tl.arange(0, BLOCK)
    held = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=held, other=0.0).to(tl.float32)
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(x_ptr + places, mask=held, other=0.0)
    if ADD:
        added = row.to(tl.float32) + tl.load(residual_ptr + places, mask=held, other=0.0)
        row = added.to(row.dtype)
        tl.store(residual_ptr + places, row, mask=held)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    tl.store(out_ptr + places, (wide * scale * weight).to(row.dtype), mask=held)


def bind() -> Norms:
    from kernels.rms_norm import Norms

    launch = Launcher(norm_rows)

    def norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, add: bool
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        tokens, size = x.shape
        if tokens:
            block = next_power_of_two(size)
            warps = min(max(block // (32 * VALUES_PER_THREAD), 1), MAX_WARPS)
            tensors = (x, residual, weight, out)
            launch((tokens, 1, 1), tensors, (eps,), (size, block, add), num_warps=warps)
        return out

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm(x, x, weight, eps, False)

    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm(x, residual, weight, eps, True), residual

    return Norms(rms_norm, add_rms_norm)
