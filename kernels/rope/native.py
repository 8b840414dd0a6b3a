"""Binds rope.c: bfloat16, contiguous, planes too, so their scales are 1; cos_sin float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.native_build import FLOAT, INT, POINTER, Library

if TYPE_CHECKING:
    from kernels.rope import RopeWriteKV


def bind(library: Library) -> RopeWriteKV:
    pointers, sizes = [POINTER] * 9, [INT] * 4
    run = library.function("rope_write_kv", *pointers, FLOAT, *sizes, POINTER)
    pool = library.pool

    def rope_write_kv(
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        k_plane: torch.Tensor,
        v_plane: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        keep: bool = False,
    ) -> torch.Tensor:
        assert k_scale == v_scale == 1
        tokens = qkv.shape[0]
        q = qkv.new_empty((tokens, num_heads, head_dim))
        run(
            pool.pointer,
            qkv.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            slots.data_ptr(),
            k_plane.data_ptr(),
            v_plane.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            q.data_ptr(),
        )
        if keep:
            heads = qkv.view(tokens, -1, head_dim)
            heads[:, num_heads : num_heads + num_kv_heads] = k_plane[slots]
        return q

    return rope_write_kv
