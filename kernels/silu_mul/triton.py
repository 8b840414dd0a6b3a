"""silu(gate) * up on the GPU: a block per piece of a row. float32 inside, rounded once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher

if TYPE_CHECKING:
    from kernels.silu_mul import SiluMul

FEW_TOKENS = 64  # up to here short pieces, so that a few rows occupy the whole device


@triton.jit
def gate_rows(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """gate_up: [T, 2 SIZE]; out: [T, SIZE]. grid: [T, SIZE / BLOCK]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = columns < SIZE
    places = gate_up_ptr + row * (2 * SIZE) + columns
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(places, mask=held, other=0.0).to(tl.float32)
    up = tl.load(places + SIZE, mask=held, other=0.0)
    gated = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, gated.to(up.dtype), mask=held)


def bind() -> SiluMul:
    launch = Launcher(gate_rows)

    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape
        size = width // 2
        out = gate_up.new_empty((tokens, size))
        if tokens and size:
            block, warps = (1024, 4) if tokens <= FEW_TOKENS else (2048, 8)
            grid = (tokens, -(-size // block), 1)
            launch(grid, (gate_up, out), (), (size, block), num_warps=warps)
        return out

    return silu_mul
