"""What a decode step computes from: made on the device, of two numbers per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kernels.choice import refuse_implementation
from kernels.step_inputs import reference

if TYPE_CHECKING:
    import torch


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
        self, page_table: torch.Tensor, where: torch.Tensor, pages: torch.Tensor
    ) -> None: ...


class Remember(Protocol):
    def __call__(
        self, last_tokens: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor
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
        case "reference" | "torch" | "native" | "triton":
            return StepInputsOps(
                decode_inputs=reference.decode_inputs,
                write_table=reference.write_table,
                remember=reference.remember,
            )
    refuse_implementation(implementation)
