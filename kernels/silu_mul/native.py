"""Binds silu_mul.c: bfloat16, contiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.native_build import INT, POINTER, Library

if TYPE_CHECKING:
    from kernels.silu_mul import SiluMul


def bind(library: Library) -> SiluMul:
    run = library.function("silu_mul", POINTER, POINTER, INT, INT, POINTER)
    pool = library.pool

    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape
        out = gate_up.new_empty((tokens, width // 2))
        run(pool.pointer, gate_up.data_ptr(), tokens, width // 2, out.data_ptr())
        return out

    return silu_mul
