"""The row gather on the GPU: a block per piece of a row, let in while the step's inputs are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher

if TYPE_CHECKING:
    from kernels.embedding import Embed

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def gather_rows(
    token_ids_ptr,
    weight_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """weight: [V, SIZE]; out: [T, SIZE]. grid: [T, SIZE / BLOCK]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = columns < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(token_ids_ptr + row)
    values = tl.load(weight_ptr + token * SIZE + columns, mask=held)
    tl.store(out_ptr + row * SIZE + columns, values, mask=held)


def bind() -> Embed:
    launch = Launcher(gather_rows)

    def embed(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tokens, size = len(token_ids), weight.shape[1]
        out = weight.new_empty((tokens, size))
        if tokens and size:
            grid = (tokens, -(-size // BLOCK), 1)
            launch(grid, (token_ids, weight, out), (), (size, BLOCK), num_warps=NUM_WARPS)
        return out

    return embed
