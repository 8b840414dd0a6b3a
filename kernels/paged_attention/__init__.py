"""Causal attention of new tokens over their rows' pages: decode and prefill in one call, GQA.

In `native` and `reference` a token's result depends on its own row only, not on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kernels.choice import (
    check_dtype,
    check_native_dtype,
    check_shape,
    check_triton_layout,
    refuse_implementation,
    require_library,
    require_triton,
)
from kernels.paged_attention import composed, native, reference

if TYPE_CHECKING:
    from kernels.native_build import Library


class PagedAttention(Protocol):
    def __call__(
        self,
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
    ) -> torch.Tensor: ...


def select(implementation: str, library: Library | None = None) -> PagedAttention:
    """The unchecked function, for the hot path."""
    match implementation:
        case "reference":
            return reference.paged_attention
        case "torch":
            return composed.paged_attention
        case "native":
            return native.bind(require_library(library))
        case "triton":
            require_triton()
            from kernels.paged_attention import triton

            return triton.paged_attention
    refuse_implementation(implementation)


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
    *,
    implementation: str = "torch",
    library: Library | None = None,
) -> torch.Tensor:
    """Returns [T, heads, head_dim] in q's dtype, contiguous.

    q: [T, heads, head_dim], the tokens of the slices one after the other. k_plane, v_plane:
    [num_slots, kv_heads, head_dim]; head h reads kv head h // (heads / kv_heads).
    page_table: [num_rows, max_pages] int32, page ids. rows, starts, lengths: [S] int32: slice i holds
    the tokens at positions starts[i] .. starts[i] + lengths[i] - 1 of row rows[i], whose K and V are
    already in the planes; the lengths sum to T. A token sees itself and what lies before it in its
    row, the last `window` positions of that (itself included) if a window is given.

    Where `bases` [S] int32 is given and not -1 the slice is no chain: token t sees the keys at
    0 .. bases[i] - 1 and those at bases[i] + j for which bit j of `visible[t]` ([T] int64, needed then)
    is set, nothing else; at least one key, and none past the slice's end. A window then counts from
    `positions[t]` ([T] int64, needed then), and for the keys before the base only.
    Ids and positions are trusted to be in range.
    """
    check_shape("q", q, (None, None, None))
    check_shape("k_plane", k_plane, (None, None, q.shape[2]))
    check_shape("v_plane", v_plane, tuple(k_plane.shape))
    check_shape("page_table", page_table, (None, None))
    for name, tensor in (("rows", rows), ("starts", starts), ("lengths", lengths)):
        check_shape(name, tensor, (rows.shape[0],))
        check_dtype(name, tensor, torch.int32)
    check_dtype("page_table", page_table, torch.int32)
    if q.shape[1] % k_plane.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads, not a multiple of the planes' {k_plane.shape[1]}"
        )
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, not {page_size}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 or None, not {window}")
    if (bases is None) != (visible is None):
        raise ValueError("bases and visible belong together: give both or neither")
    if bases is not None and window is not None and positions is None:
        raise ValueError("positions are needed where bases and a window are given")
    if bases is not None:
        check_shape("bases", bases, (rows.shape[0],))
        check_dtype("bases", bases, torch.int32)
    for name, optional in (("visible", visible), ("positions", positions)):
        if optional is not None:
            check_shape(name, optional, (q.shape[0],))
            check_dtype(name, optional, torch.int64)
    if int(lengths.sum()) != q.shape[0]:
        raise ValueError(f"lengths sum to {int(lengths.sum())}, but q has {q.shape[0]} tokens")
    check_native_dtype(implementation, q=q, k_plane=k_plane, v_plane=v_plane)
    check_triton_layout(implementation, q=q, k_plane=k_plane, v_plane=v_plane)
    return select(implementation, library)(
        q,
        k_plane,
        v_plane,
        page_table,
        rows,
        starts,
        lengths,
        page_size,
        scale,
        window,
        bases,
        visible,
        positions,
    )
