# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""One to four tokens: y = W x as fast as the weight can be read.

A program makes ROWS channels. Its products stay in registers, [ROWS, BLOCK] float32 for each token, and
are summed once at the end, so the order of the sum depends on ROWS and BLOCK alone. The norm before and
what follows are done on the way: a norm's scale is one number, so it is applied to the finished sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.prefetch import prefetch_rows


@triton.jit
def load_token(x_ptr, norm_ptr, token, k, K: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """[BLOCK] float32 of a token from column k on; twice: as it is, and times the norm's weight."""
    columns = k + tl.arange(0, BLOCK)
    if EVEN:
        x = tl.load(x_ptr + token * K + columns).to(tl.float32)
    else:
        x = tl.load(x_ptr + token * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    scaled = x
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + columns, mask=columns < K, other=0.0)
        scaled = x * norm.to(tl.float32)
    return x, scaled


@triton.jit
def finish_token(
    total, squares, norm_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, first, token, N, eps,
    K: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Sums, scales and stores ROWS channels of a token."""
    rows = first + tl.arange(0, ROWS)
    y = tl.sum(total, 1)
    if norm_ptr is not None:
        y *= tl.rsqrt(tl.sum(squares) / K + eps)
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + rows, mask=rows < N, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    width = N
    if GATED:
        gate, up = tl.split(tl.reshape(y, [ROWS // 2, 2]))
        y = gate / (1.0 + tl.exp(-gate)) * up
        rows = first // 2 + tl.arange(0, ROWS // 2)
        width = N // 2
    places = token * width + rows
    if residual_ptr is not None:
        y += tl.load(residual_ptr + places, mask=rows < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, y.to(out_ptr.dtype.element_ty), mask=rows < width)


@triton.jit(do_not_specialize=["M", "prefetch", "wave"])
def stream_rows(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    N,
    prefetch,  # columns of each row to ask for before the wait, and
    wave,  # how many programs do so: about those that start at once
    eps,
    K: tl.constexpr,
    TOKENS: tl.constexpr,  # 1, 2 or 4, not less than M
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,  # ROWS divides N, and BLOCK divides K
    LATE: tl.constexpr,  # the next kernel is let in behind the loop, not before it
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [M, K]; norm: [K]; weight: [N, K]; scale, bias: [N]; residual, out: [M, N], or out [M, N / 2]
    if GATED: channels 2i and 2i + 1 are then gate and up of channel i. None: not wanted.
    grid: [N / ROWS]."""
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    if PDL:
        if not LATE:
            gdc_launch_dependents()
        if tl.program_id(0) < wave:
            prefetch_rows(weight_ptr, first, N, K, 0, prefetch, ROWS)
        gdc_wait()
    places = weight_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    total0 = tl.zeros([ROWS, BLOCK], tl.float32)
    squares0 = tl.zeros([BLOCK], tl.float32)
    if TOKENS > 1:  # a token that is not there is the last one again, and not stored
        total1, squares1 = total0, squares0
    if TOKENS > 2:
        total2, squares2, total3, squares3 = total0, squares0, total0, squares0
        third = tl.minimum(M - 1, 2)
        fourth = tl.minimum(M - 1, 3)
    for k in tl.range(0, K, BLOCK, num_stages=STAGES):
        if EVEN:
            weight = tl.load(places + k, eviction_policy="evict_first")
        else:
            both = (rows < N)[:, None] & (k + columns < K)[None, :]
            weight = tl.load(places + k, mask=both, other=0.0, eviction_policy="evict_first")
        weight = weight.to(tl.float32)
        x, scaled = load_token(x_ptr, norm_ptr, 0, k, K, BLOCK, EVEN)
        total0 += weight * scaled[None, :]
        squares0 += x * x
        if TOKENS > 1:
            x, scaled = load_token(x_ptr, norm_ptr, 1, k, K, BLOCK, EVEN)
            total1 += weight * scaled[None, :]
            squares1 += x * x
        if TOKENS > 2:
            x, scaled = load_token(x_ptr, norm_ptr, third, k, K, BLOCK, EVEN)
            total2 += weight * scaled[None, :]
            squares2 += x * x
            x, scaled = load_token(x_ptr, norm_ptr, fourth, k, K, BLOCK, EVEN)
            total3 += weight * scaled[None, :]
            squares3 += x * x
    if PDL and LATE:
        gdc_launch_dependents()
    finish_token(
        total0, squares0, norm_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, first, 0, N, eps,
        K, ROWS, GATED,
    )  # fmt: skip
    if TOKENS > 1:
        finish_token(
            total1, squares1, norm_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, first, 1, N, eps,
            K, ROWS, GATED,
        )  # fmt: skip
    if TOKENS > 2:
        finish_token(
            total2, squares2, norm_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, first, 2, N, eps,
            K, ROWS, GATED,
        )  # fmt: skip
        if M > 3:
            finish_token(
                total3, squares3, norm_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, first, 3, N,
                eps, K, ROWS, GATED,
            )  # fmt: skip
