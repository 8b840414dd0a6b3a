"""Drawing a token for each line of logits: temperature, top_k, top_p, min_p and the race, greedy too.

The rules and their order: `kernels.sample.truncate`; the draw: `kernels.sample.race`; the noise:
`kernels.sample.noise`. A line's token depends on its logits and its row of the table, on nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernels.choice import check_dtype, check_shape, refuse_implementation, require_triton

if TYPE_CHECKING:
    import torch

    from kernels.sample.table import Drawn


class Sample(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        table: torch.Tensor,
        drawn: Drawn,
        offsets: torch.Tensor | None = None,
        /,
    ) -> None: ...


def select(implementation: str) -> Sample:
    """The unchecked function: "reference" or "torch", any device, may wait for it; "triton", which never
    waits and may be recorded in a CUDA graph."""
    match implementation:
        case "reference" | "torch":
            from kernels.sample import reference

            return reference.sample
        case "triton":
            require_triton()
            from kernels.sample import triton

            return triton.bind()
    refuse_implementation(implementation)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    drawn: Drawn,
    offsets: torch.Tensor | None = None,
    *,
    implementation: str = "reference",
) -> None:
    """Fills `drawn`, whose size N says how many lines count. Nothing else is changed, but that without
    `offsets` each row has generated one token more.

    logits: [N or more, V] float32 or bfloat16, V at least 1, a line's values next to each other.
    rows: [N or more] int32, of each line its row in `table` [rows, COLUMNS], see `kernels.sample.table`.
    offsets: [N] int64, how many tokens a line's noise lies behind its row's next.
    """
    import torch

    from kernels.sample.table import COLUMNS

    check_shape("logits", logits, (None, None))
    check_shape("table", table, (None, COLUMNS))
    check_dtype("table", table, torch.int64)
    check_dtype("rows", rows, torch.int32)
    num = len(drawn)
    if logits.shape[1] == 0:
        raise ValueError("logits must have at least one column")
    if logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
        raise ValueError("logits must be float32 or bfloat16, a line's values next to each other")
    if len(logits) < num or len(rows) < num:
        raise ValueError(
            f"{num} lines need as many logits and rows, not {len(logits)}, {len(rows)}"
        )
    if offsets is not None:
        check_shape("offsets", offsets, (num,))
        check_dtype("offsets", offsets, torch.int64)
    select(implementation)(logits, rows, table, drawn, offsets)
