"""Binds rms_norm.c: bfloat16, contiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.native_build import FLOAT, INT, POINTER, Library

if TYPE_CHECKING:
    from kernels.rms_norm import Norms


def bind(library: Library) -> Norms:
    from kernels.rms_norm import Norms

    plain = library.function("rms_norm", *[POINTER] * 3, FLOAT, INT, INT, POINTER)
    added = library.function("add_rms_norm", *[POINTER] * 4, FLOAT, INT, INT, POINTER)
    pool = library.pool

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        tokens, size = x.shape
        plain(pool.pointer, x.data_ptr(), weight.data_ptr(), eps, tokens, size, out.data_ptr())
        return out

    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(x)
        tokens, size = x.shape
        added(
            pool.pointer,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            tokens,
            size,
            out.data_ptr(),
        )
        return out, residual

    return Norms(rms_norm, add_rms_norm)
