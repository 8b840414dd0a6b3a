"""What a decode step computes from: made on the device, of two numbers per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.choice import (
    check_dtype,
    check_shape,
    check_triton_layout,
    refuse_implementation,
    require_triton,
)
from kernels.step_inputs import reference


class DecodeInputs(Protocol):
    def __call__(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        page_table: torch.Tensor,
        last_tokens: torch.Tensor,
        page_size: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None: ...


class WriteTable(Protocol):
    def __call__(
        self, page_table: torch.Tensor, where: torch.Tensor, pages: torch.Tensor, /
    ) -> None: ...


class Remember(Protocol):
    def __call__(
        self, last_tokens: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, /
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputsOps:
    """The unchecked callables.

    decode_inputs: rows, starts [S] int32, page_table [R, P] int32, last_tokens [R] int64; fills
    token_ids, positions, slots [S] int64: the row's last token, where it stands, where its K and V go.
    write_table: page_table viewed flat at `where` [N] int32 becomes `pages` [N] int32.
    remember: last_tokens at `rows` [S] int32 become `tokens` [S] int64.
    """

    decode_inputs: DecodeInputs
    write_table: WriteTable
    remember: Remember


def select(implementation: str) -> StepInputsOps:
    """The unchecked functions, for the hot path."""
    match implementation:
        case "triton":
            require_triton()
            from kernels.step_inputs import triton

            return triton.bind()
        case "reference" | "torch" | "native":
            return StepInputsOps(
                decode_inputs=reference.decode_inputs,
                write_table=reference.write_table,
                remember=reference.remember,
            )
    refuse_implementation(implementation)


def decode_inputs(
    rows: torch.Tensor,
    starts: torch.Tensor,
    page_table: torch.Tensor,
    last_tokens: torch.Tensor,
    page_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    implementation: str = "torch",
) -> None:
    """Fills token_ids, positions and slots [S] int64. For starts[i] of rows[i]: the last token that row
    was given, the position, and the slot, page_table[row, start // page] * page + start % page.

    rows, starts: [S] int32; page_table: [R, P] int32; last_tokens: [at least R] int64. Rows, starts and
    pages are trusted to be in range.
    """
    count = (len(rows),)
    for name, tensor in (("rows", rows), ("starts", starts)):
        check_shape(name, tensor, count)
        check_dtype(name, tensor, torch.int32)
    check_shape("page_table", page_table, (None, None))
    check_dtype("page_table", page_table, torch.int32)
    check_shape("last_tokens", last_tokens, (None,))
    check_dtype("last_tokens", last_tokens, torch.int64)
    if len(last_tokens) < len(page_table):
        raise ValueError(
            f"last_tokens must have an entry for each of the table's {len(page_table)} rows, "
            f"not {len(last_tokens)}"
        )
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, not {page_size}")
    outputs = {"token_ids": token_ids, "positions": positions, "slots": slots}
    for name, tensor in outputs.items():
        check_shape(name, tensor, count)
        check_dtype(name, tensor, torch.int64)
    inputs = {"rows": rows, "starts": starts, "page_table": page_table, "last_tokens": last_tokens}
    check_triton_layout(implementation, **inputs, **outputs)
    select(implementation).decode_inputs(
        rows, starts, page_table, last_tokens, page_size, token_ids, positions, slots
    )


def write_table(
    page_table: torch.Tensor,
    where: torch.Tensor,
    pages: torch.Tensor,
    *,
    implementation: str = "torch",
) -> None:
    """page_table [R, P] int32, seen flat, becomes pages [N] int32 at where [N] int32, which differ and
    are trusted to be in range."""
    check_shape("page_table", page_table, (None, None))
    check_shape("where", where, (None,))
    check_shape("pages", pages, (len(where),))
    named = {"page_table": page_table, "where": where, "pages": pages}
    for name, tensor in named.items():
        check_dtype(name, tensor, torch.int32)
    check_triton_layout(implementation, **named)
    select(implementation).write_table(page_table, where, pages)


def remember(
    last_tokens: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    *,
    implementation: str = "torch",
) -> None:
    """last_tokens [R] int64 become tokens [S] int64 at rows [S] int32, which differ and are trusted to
    be in range."""
    check_shape("last_tokens", last_tokens, (None,))
    check_shape("rows", rows, (None,))
    check_shape("tokens", tokens, (len(rows),))
    check_dtype("last_tokens", last_tokens, torch.int64)
    check_dtype("rows", rows, torch.int32)
    check_dtype("tokens", tokens, torch.int64)
    check_triton_layout(implementation, last_tokens=last_tokens, rows=rows, tokens=tokens)
    select(implementation).remember(last_tokens, rows, tokens)
