"""Attention of MLA in its two forms, see `srt.layers.latent`.

`attend_latents`  absorbed: queries on the latents of their rows' pages, decode and prefill in one call
`attend_spans`    expanded: queries on K and V side by side, causal or not, with the logarithm of the
sums
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.choice import check_dtype, check_shape, refuse_implementation, require_triton
from kernels.mla_attention import reference


def attend_latents(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    plane: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scale: float,
    *,
    implementation: str = "torch",
) -> torch.Tensor:
    """Returns the weighted sums of latents, [T, heads, rank] in q's dtype.

    q_latent: [T, heads, rank], what of the queries meets the latents; q: [T, heads, any], whose last
    `rope` channels meet the rotated keys; both with tokens any stride apart. plane: [num_slots, 1, rank
    + rope]. page_table: [num_rows, max_pages] int32. rows, starts, lengths: [S] int32, slices one after
    the other: slice i holds the tokens at positions starts[i] and on of row rows[i], which see what
    lies before them and themselves. Ids and positions are trusted to be in range.
    """
    tokens, heads, rank = q_latent.shape
    check_shape("q", q, (tokens, heads, None))
    check_shape("plane", plane, (None, 1, None))
    check_shape("page_table", page_table, (None, None))
    check_dtype("page_table", page_table, torch.int32)
    for name, tensor in (("rows", rows), ("starts", starts), ("lengths", lengths)):
        check_shape(name, tensor, (rows.shape[0],))
        check_dtype(name, tensor, torch.int32)
    if not 0 < plane.shape[2] - rank <= q.shape[2]:
        raise ValueError(
            f"plane holds {plane.shape[2]} numbers of a token, of which q_latent meets {rank}: the rest "
            f"must be one of q's {q.shape[2]} channels or more, and no more than these"
        )
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, not {page_size}")
    if int(lengths.sum()) != tokens:
        raise ValueError(f"lengths sum to {int(lengths.sum())}, but q has {tokens} tokens")
    given = (q_latent, q, plane, page_table, rows, starts, lengths, page_size, scale)
    match implementation:
        case "reference" | "torch" | "native":
            return reference.attend_latents(*given)
        case "triton":
            require_triton()
            from kernels.mla_attention import triton

            return triton.attend_latents(*given)
    refuse_implementation(implementation)


def attend_spans(
    q: torch.Tensor,
    kv: torch.Tensor,
    turned: torch.Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    causal: bool,
    scale: float,
    *,
    implementation: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [T, heads, value] in q's dtype and the natural logarithm of the sums, [T, heads] float32.

    q: [T, heads, nope + rope], tokens any stride apart. kv: [N, heads, nope + value], contiguous;
    turned: [N, rope], tokens any stride apart: a key is the first `nope` of a head's numbers in kv and
    what all heads share in turned, the rest of kv is V. Span i has the
    next queries[i] of the queries and the next keys[i] of the keys, at least one of each. causal: its
    last query sees its last key, those before it one less each (so there must be as many keys as
    queries); else every query sees every key.
    """
    check_shape("q", q, (sum(queries), None, None))
    check_shape("turned", turned, (sum(keys), None))
    check_shape("kv", kv, (sum(keys), q.shape[1], None))
    nope = q.shape[2] - turned.shape[1]
    if not 0 < nope < kv.shape[2]:
        raise ValueError(
            f"of q's {q.shape[2]} channels turned meets {turned.shape[1]}, which must leave some, and "
            f"fewer than the {kv.shape[2]} of kv"
        )
    if min((*queries, *keys), default=1) < 1 or len(queries) != len(keys):
        raise ValueError("queries and keys must have as many entries, each at least 1")
    if causal and any(k < q for q, k in zip(queries, keys, strict=True)):
        raise ValueError("a causal span needs as many keys as queries, or more")
    match implementation:
        case "reference" | "torch" | "native":
            return reference.attend_spans(q, kv, turned, queries, keys, causal, scale)
        case "triton":
            require_triton()
            from kernels.mla_attention import triton_spans

            return triton_spans.attend_spans(q, kv, turned, queries, keys, causal, scale)
    refuse_implementation(implementation)
