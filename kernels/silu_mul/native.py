"""Binds silu_mul.c: bfloat16, contiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.native_build import INT, POINTER, Library

if TYPE_CHECKING:
    from kernels.silu_mul import SiluMul


def bind(library: Library) -> SiluMul:
    run = library.function("silu_mul", POINTER, INT, INT, POINTER, INT)
    threads = torch.get_num_threads()

    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up.shape
        out = gate_up.new_empty((tokens, width // 2))
        run(gate_up.data_ptr(), tokens, width // 2, out.data_ptr(), threads)
        return out

    return silu_mul
