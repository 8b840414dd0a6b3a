# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Activations to fp8 on the GPU, a scale for each token, with the norm before it if there is one."""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher, next_power_of_two
from kernels.linear.quantized import FP8, FP8_MOST

VALUES_PER_THREAD = 16
MAX_WARPS = 16


@triton.jit
def quantize_rows(
    x_ptr,
    norm_ptr,
    out_ptr,
    scale_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """x, out: [T, SIZE]; norm: [SIZE] or None; scale: [T]. grid: [T]."""
    columns = tl.arange(0, BLOCK)
    held = columns < SIZE
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * SIZE + columns, mask=held, other=0.0)
    wide = x.to(tl.float32)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + columns, mask=held, other=0.0).to(tl.float32)
        wide = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps) * weight
        wide = wide.to(x.dtype).to(tl.float32)
    scale = tl.max(tl.abs(wide)) / MOST
    inverse = 1.0 / tl.where(scale > 0.0, scale, 1.0)
    values = tl.clamp(wide * inverse, -MOST, MOST)
    tl.store(out_ptr + row * SIZE + columns, values.to(tl.float8e4nv), mask=held)
    tl.store(scale_ptr + row, scale)


class Quantize(Protocol):
    def __call__(
        self, x: torch.Tensor, norm: tuple[torch.Tensor, float] | None, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, K]; norm: [K] weight and eps, applied first. Returns (e4m3 [T, K], scales [T])."""
        ...


def bind() -> Quantize:
    launch = Launcher(quantize_rows)

    def quantize(
        x: torch.Tensor, norm: tuple[torch.Tensor, float] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, size = x.shape
        out = torch.empty((tokens, size), dtype=FP8, device=x.device)
        scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
        if tokens:
            block = next_power_of_two(size)
            warps = min(max(block // (32 * VALUES_PER_THREAD), 1), MAX_WARPS)
            weight, eps = norm or (None, 0.0)
            constants = (size, block, FP8_MOST)
            tensors = (x, weight, out, scale)
            launch((tokens, 1, 1), tensors, (eps,), constants, num_warps=warps)
        return out, scale

    return quantize
