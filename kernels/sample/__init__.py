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


class AcceptChain(Protocol):
    def __call__(
        self,
        drawn: Drawn,
        firsts: torch.Tensor,
        guesses: torch.Tensor,
        rows: torch.Tensor,
        table: torch.Tensor,
        accepted: torch.Tensor,
        /,
    ) -> None: ...


def select(implementation: str) -> tuple[Sample, AcceptChain]:
    """The unchecked functions: "reference" or "torch", any device, may wait for it; "triton", never
    waits, and both may be recorded in a CUDA graph."""
    match implementation:
        case "reference" | "torch":
            from kernels.sample import reference

            return reference.sample, reference.accept_chain
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
    select(implementation)[0](logits, rows, table, drawn, offsets)


def accept_chain(
    drawn: Drawn,
    firsts: torch.Tensor,
    guesses: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    accepted: torch.Tensor,
    *,
    implementation: str = "reference",
) -> None:
    """Which guesses of S rows are what was drawn before them, and how far the rows have come.

    drawn: of all lines: row i's begin at `firsts[i]`, the first drawn behind its last known token, the
    others behind each guess. firsts: [S] int64. guesses: [S, K] int64, -1 behind a row's last.
    rows: [S or more] int32, all different, those of `table`, which counts the tokens put out.
    accepted: [S, K + 4] int64, filled: how many tokens are put out, 1 to K + 1; the last of them; the
    largest logit of the row's first line, as the bits of a float64; the tokens, then -1. A line whose
    largest logit is not finite ends a run: before it if the run has a token, else with token 0 and the
    count 1.
    """
    import torch

    size, depth = guesses.shape
    check_shape("firsts", firsts, (size,))
    check_shape("accepted", accepted, (size, depth + 4))
    for name, tensor in (("firsts", firsts), ("guesses", guesses), ("accepted", accepted)):
        check_dtype(name, tensor, torch.int64)
    select(implementation)[1](drawn, firsts, guesses, rows, table, accepted)
