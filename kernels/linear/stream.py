# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""One token: y = W x as fast as the weight can be read.

A program makes ROWS channels. Its products stay in registers, [ROWS, BLOCK] float32, and are summed once
at the end, so the order of the sum depends on ROWS and BLOCK alone. The norm before and what follows are
done on the way: a norm's scale is one number, so it is applied to the finished sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.prefetch import prefetch_rows


@triton.jit
def stream_rows(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,  # ROWS divides N, and BLOCK divides K
    PREFETCH: tl.constexpr,  # columns of each row to ask for before the wait, and
    WAVE: tl.constexpr,  # how many programs do so: about those that start at once
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x, norm: [K]; weight: [N, K]; scale, bias: [N]; residual, out: [N], or out [N / 2] if GATED:
    channels 2i and 2i + 1 are then gate and up of channel i. None: not wanted. grid: [N / ROWS]."""
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    held = rows < N
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            if tl.program_id(0) < WAVE:
                prefetch_rows(weight_ptr, first, N, K, 0, PREFETCH, ROWS)
        gdc_wait()
    places = weight_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for k in tl.range(0, K, BLOCK, num_stages=STAGES):
        if EVEN:
            weight = tl.load(places + k, eviction_policy="evict_first")
            x = tl.load(x_ptr + k + columns).to(tl.float32)
        else:
            inside = k + columns < K
            both = held[:, None] & inside[None, :]
            weight = tl.load(places + k, mask=both, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + k + columns, mask=inside, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + k + columns, mask=k + columns < K, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1)
    if norm_ptr is not None:
        y *= tl.rsqrt(tl.sum(squares) / K + eps)
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + rows, mask=held, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=held, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(y, [ROWS // 2, 2]))
        y = gate / (1.0 + tl.exp(-gate)) * up
        rows = first // 2 + tl.arange(0, ROWS // 2)
        held = rows < N // 2
    if residual_ptr is not None:
        y += tl.load(residual_ptr + rows, mask=held, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=held)
