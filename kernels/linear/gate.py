# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""silu(gate) * up where gate and up of a channel are neighbours: [T, 2 I] -> [T, I]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher
from kernels.silu_mul import SiluMul

BLOCK = 1024


@triton.jit
def gate_pairs(pairs_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """pairs: [T, 2 size]; out: [T, size]. grid: [T, size / BLOCK]."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    both = 2 * first + tl.arange(0, 2 * BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pairs = tl.load(pairs_ptr + row * (2 * size) + both, mask=both < 2 * size, other=0.0)
    gate, up = tl.split(tl.reshape(pairs.to(tl.float32), [BLOCK, 2]))
    gated = gate / (1.0 + tl.exp(-gate)) * up
    columns = first + tl.arange(0, BLOCK)
    tl.store(out_ptr + row * size + columns, gated.to(pairs.dtype), mask=columns < size)


def bind() -> SiluMul:
    launch = Launcher(gate_pairs)

    def silu_mul(pairs: torch.Tensor) -> torch.Tensor:
        tokens, width = pairs.shape
        out = pairs.new_empty((tokens, width // 2))
        if tokens:
            grid = (tokens, -(-width // (2 * BLOCK)), 1)
            launch(grid, (pairs, out), (width // 2,), (BLOCK,))
        return out

    return silu_mul


def pair_rows(num_rows: int, device: torch.device) -> torch.Tensor:
    """The order that brings all gates before all ups to gate 0, up 0, gate 1, up 1, ..."""
    return torch.arange(num_rows, device=device).view(2, -1).t().flatten()
