# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Weights on their way into the L2 cache while the kernel before still runs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_rows(weight, first, num_rows, stride, begin, size, ROWS: tl.constexpr):
    """Asks for `size` elements (a multiple of 16 bytes, as the address is) of each of ROWS rows: one
    bulk request per row, each made by one thread. Nothing waits for it. sm_90 and newer."""
    rows = tl.minimum(first + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
    width: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        """{
        .reg .pred mine;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.lt.u32 mine, thread, $3;
        @mine cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r",
        [weight + rows * stride + begin, size * width, ROWS],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
