"""Expanded MLA on the GPU: queries on K and V side by side, where K is wider than V.

K is read in two parts, so that neither is padded: the one as wide as a latent's share of a head, and the
rotated one. A program holds ROWS queries of one head and walks their span's keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher
from kernels.paged_attention.tiles import Tiles

LOG2_E = 1.4426950408889634
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
SPAN_FIELDS: tl.constexpr = tl.constexpr(8)
ROWS = 128
BLOCK = 64
WARPS = 8
STAGES = 3


@triton.jit
def attend(
    q_ptr,
    kv_ptr,
    turned_ptr,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    scale,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    TURNED_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [HEADS, tiles]. kv: [N, HEADS, NOPE + VALUE]; turned: [N, ROPE], rows TURNED_STRIDE apart,
    the keys' rotated part, which all heads share. tiles [N, 8] int32: first query, number of queries,
    first key, number of keys that the last query sees, keys that the first query sees, three unused.
    scale: times log2(e)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    record = tiles_ptr + tl.program_id(1) * SPAN_FIELDS
    first = tl.load(record)
    count = tl.load(record + 1)
    first_key = tl.load(record + 2)
    num_keys = tl.load(record + 3)
    clear = tl.load(record + 4)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, NOPE)
    e = tl.arange(0, ROPE)
    w = tl.arange(0, VALUE)
    n = tl.arange(0, BLOCK)
    held = r < count
    tokens = (first + r).to(tl.int64)
    q_at = q_ptr + tokens[:, None] * Q_STRIDE + head * (NOPE + ROPE)
    q = tl.load(q_at + d[None, :], mask=held[:, None], other=0.0)
    q_turned = tl.load(q_at + NOPE + e[None, :], mask=held[:, None], other=0.0)
    own = clear + r  # keys that a query sees, if causal
    KV_STRIDE: tl.constexpr = HEADS * (NOPE + VALUE)
    k_at = kv_ptr + first_key.to(tl.int64) * KV_STRIDE + head * (NOPE + VALUE)
    v_at = k_at + NOPE
    turned_at = turned_ptr + first_key.to(tl.int64) * TURNED_STRIDE
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE], tl.float32)
    whole = clear // BLOCK * BLOCK
    for block in tl.range(0, whole, BLOCK):
        keys = (block + n).to(tl.int64)[:, None]
        places = keys * KV_STRIDE
        k = tl.load(k_at + places + d[None, :])
        k_turned = tl.load(turned_at + keys * TURNED_STRIDE + e[None, :])
        v = tl.load(v_at + places + w[None, :])
        acc, m, total = see(acc, m, total, q, q_turned, k, k_turned, v, n, own, scale, WIDE, False)
    for block in tl.range(whole, num_keys, BLOCK):
        keys = (block + n).to(tl.int64)[:, None]
        places = keys * KV_STRIDE
        there = (block + n < num_keys)[:, None]
        k = tl.load(k_at + places + d[None, :], mask=there, other=0.0)
        turned_keys = turned_at + keys * TURNED_STRIDE + e[None, :]
        k_turned = tl.load(turned_keys, mask=there, other=0.0)
        v = tl.load(v_at + places + w[None, :], mask=there, other=0.0)
        if CAUSAL:
            limit = tl.minimum(own, num_keys)
        else:
            limit = tl.zeros([ROWS], tl.int32) + num_keys
        acc, m, total = see(
            acc, m, total, q, q_turned, k, k_turned, v, block + n, limit, scale, WIDE, True
        )
    total = tl.where(held, total, 1.0)
    places = tokens * HEADS + head
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places[:, None] * VALUE + w[None, :], out, mask=held[:, None])
    tl.store(lse_ptr + places, (m + tl.log2(total)) * LN_2, mask=held)


@triton.jit
def see(
    acc, m, total, q, q_turned, k, k_turned, v, n, limit, scale,
    WIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax, in base 2, after the keys n, of which a query sees those before its limit."""
    if WIDE:
        scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)))
        scores = tl.dot(q_turned.to(tl.float32), tl.trans(k_turned.to(tl.float32)), scores)
    else:
        scores = tl.dot(q, tl.trans(k))
        scores = tl.dot(q_turned, tl.trans(k_turned), scores)
    scores = scores * scale
    if MASKED:
        scores = tl.where(n[None, :] < limit[:, None], scores, float("-inf"))
    larger = tl.maximum(m, tl.max(scores, 1))
    if MASKED:
        above = tl.where(larger == float("-inf"), 0.0, larger)
    else:
        above = larger
    p = tl.exp2(scores - above[:, None])
    shrink = tl.exp2(m - above)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    p = p.to(q.dtype)
    if WIDE:
        acc = tl.dot(p.to(tl.float32), v.to(tl.float32), acc)
    else:
        acc = tl.dot(p, v, acc)
    return acc, larger, total


def cut_spans(queries: Sequence[int], keys: Sequence[int], causal: bool) -> Tiles:
    """Tiles [N, 8] int32 on the host, those with the most keys first."""
    tiles = []
    first = first_key = 0
    for num, num_keys in zip(queries, keys, strict=True):
        starts = np.arange(0, num, ROWS)
        counts = np.minimum(num - starts, ROWS)
        made = np.zeros((len(starts), 8), dtype=np.int32)
        made[:, 0] = first + starts
        made[:, 1] = counts
        made[:, 2] = first_key
        made[:, 3] = num_keys - num + starts + counts if causal else num_keys
        made[:, 4] = num_keys - num + starts + 1 if causal else num_keys
        tiles.append(made)
        first += num
        first_key += num_keys
    found = np.concatenate(tiles)
    return found[np.argsort(-found[:, 3], kind="stable")]


class SpanAttention:
    """Runs tiles that `cut_spans` made."""

    def __init__(self) -> None:
        self._launch = Launcher(attend)

    def run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        turned: torch.Tensor,
        tiles: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.mla_attention.attend_spans`. kv [N, heads, nope + value], turned [N, rope]."""
        tokens, heads, query = q.shape
        nope = query - turned.shape[1]
        value = kv.shape[2] - nope
        out = torch.empty((tokens, heads, value), dtype=q.dtype, device=q.device)
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
        assert q.stride(1) == query and kv.is_contiguous() and turned.stride(1) == 1
        self._launch(
            (heads, len(tiles), 1),
            (q, kv, turned, out, lse, tiles),
            (scale * LOG2_E,),
            (
                heads,
                nope,
                query - nope,
                value,
                q.stride(0),
                turned.stride(0),
                ROWS,
                BLOCK,
                causal,
                q.device.type == "cpu",
            ),
            num_warps=WARPS,
            num_stages=STAGES,
        )
        return out, lse


def attend_spans(
    q: torch.Tensor,
    kv: torch.Tensor,
    turned: torch.Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts the tiles too; a backend does that once for all layers."""
    tiles = torch.from_numpy(cut_spans(queries, keys, causal)).to(q.device)
    return SpanAttention().run(q, kv, turned, tiles, causal, scale)
