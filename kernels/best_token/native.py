"""Binds best_token.c: float32, a row's values next to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.native_build import INT, POINTER, Library

if TYPE_CHECKING:
    from kernels.best_token import BestToken


def bind(library: Library) -> BestToken:
    run = library.function("best_token", POINTER, POINTER, INT, INT, INT, POINTER, POINTER)
    pool = library.pool

    def best_token(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, size = logits.shape
        values = torch.empty(rows)
        tokens = torch.empty(rows, dtype=torch.int64)
        run(
            pool.pointer,
            logits.data_ptr(),
            rows,
            logits.stride(0),
            size,
            values.data_ptr(),
            tokens.data_ptr(),
        )
        return values, tokens

    return best_token
