"""Binds paged_attention.c: bfloat16, contiguous; int32 tables.

Its buffers lie on the threads' stacks: up to MAX_GROUP q heads per kv head and MAX_HEAD_DIM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.native_build import FLOAT, INT, POINTER, Library

if TYPE_CHECKING:
    from kernels.paged_attention import PagedAttention

MAX_GROUP = 48
MAX_HEAD_DIM = 512
NO_WINDOW = 1 << 62


def bind(library: Library) -> PagedAttention:
    run = library.function(
        "paged_attention",
        *[POINTER] * 5,
        INT,
        *[POINTER] * 3,
        INT,
        INT,
        FLOAT,
        INT,
        *[POINTER] * 3,
        *[INT] * 3,
        POINTER,
    )
    pool = library.pool

    def paged_attention(
        q: torch.Tensor,
        k_plane: torch.Tensor,
        v_plane: torch.Tensor,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        page_size: int,
        scale: float,
        window: int | None,
        bases: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        _, heads, head_dim = q.shape
        run(
            pool.pointer,
            q.data_ptr(),
            k_plane.data_ptr(),
            v_plane.data_ptr(),
            page_table.data_ptr(),
            page_table.stride(0),
            rows.data_ptr(),
            starts.data_ptr(),
            lengths.data_ptr(),
            rows.shape[0],
            page_size,
            scale,
            NO_WINDOW if window is None else window,
            None if bases is None else bases.data_ptr(),
            None if visible is None else visible.data_ptr(),
            None if positions is None or window is None else positions.data_ptr(),
            heads,
            k_plane.shape[1],
            head_dim,
            out.data_ptr(),
        )
        return out

    return paged_attention
