"""A decode step's inputs on the GPU: one small launch each, one compiled form whatever the counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher

if TYPE_CHECKING:
    from kernels.step_inputs import StepInputsOps

BLOCK = 128


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "starts_ptr",
        "token_ids_ptr",
        "positions_ptr",
        "slots_ptr",
    ],
)
def locate_rows(
    rows_ptr,
    starts_ptr,
    page_table_ptr,
    last_tokens_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    count,
    MAX_PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Shapes as in `kernels.step_inputs.decode_inputs`; grid: [S / BLOCK]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = index < count
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(rows_ptr + index, mask=held, other=0).to(tl.int64)
    start = tl.load(starts_ptr + index, mask=held, other=0)
    token = tl.load(last_tokens_ptr + row, mask=held, other=0)
    page = tl.load(page_table_ptr + row * MAX_PAGES + start // PAGE_SIZE, mask=held, other=0)
    tl.store(token_ids_ptr + index, token, mask=held)
    tl.store(positions_ptr + index, start.to(tl.int64), mask=held)
    slot = page.to(tl.int64) * PAGE_SIZE + start % PAGE_SIZE
    tl.store(slots_ptr + index, slot, mask=held)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["where_ptr", "values_ptr"])
def scatter(table_ptr, where_ptr, values_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """table[where[i]] = values[i] for i < count; grid: [count / BLOCK]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = index < count
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    where = tl.load(where_ptr + index, mask=held, other=0)
    tl.store(table_ptr + where, tl.load(values_ptr + index, mask=held, other=0), mask=held)


def bind() -> StepInputsOps:
    from kernels.step_inputs import StepInputsOps

    launch_rows, launch_scatter = Launcher(locate_rows), Launcher(scatter)

    def decode_inputs(
        rows: torch.Tensor,
        starts: torch.Tensor,
        page_table: torch.Tensor,
        last_tokens: torch.Tensor,
        page_size: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        count = len(rows)
        if count:
            launch_rows(
                (-(-count // BLOCK), 1, 1),
                (rows, starts, page_table, last_tokens, token_ids, positions, slots),
                (count,),
                (page_table.shape[1], page_size, BLOCK),
            )

    def scatter_values(table: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> None:
        count = len(where)
        if count:
            launch_scatter((-(-count // BLOCK), 1, 1), (table, where, values), (count,), (BLOCK,))

    return StepInputsOps(
        decode_inputs=decode_inputs, write_table=scatter_values, remember=scatter_values
    )
