"""From a step's plain numbers to the tensors a model reads. No Python per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from srt.protocols.attention import AttentionBatch
from srt.protocols.forward_batch import ForwardBatch, Slice, Window
from srt.runner.page_table import PageTable
from srt.runner.staging import Array

Longs = np.ndarray[tuple[int], np.dtype[np.int64]]
Ints = np.ndarray[tuple[int], np.dtype[np.int32]]
Send = Callable[[Sequence[Array]], list[torch.Tensor]]  # to where the model computes


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """`keep` names the tokens whose hidden states are wanted: first the last 1 + draft tokens of each
    sampling slice, then those whose successors' logprobs are asked for. None: every token, in order."""

    token_ids: torch.Tensor  # [T] int64
    attention: AttentionBatch
    keep: torch.Tensor | None  # [K] int64
    sampling: list[Slice]
    sampling_rows: torch.Tensor  # [len(sampling)] int32
    scoring: list[Slice]


def send_nowhere(arrays: Sequence[Array]) -> list[torch.Tensor]:
    """On a CPU the numbers are where the model computes."""
    return [torch.from_numpy(array) for array in arrays]


def build_inputs(
    batch: ForwardBatch,
    table: PageTable,
    last_tokens: torch.Tensor,
    page_size: int,
    send: Send = send_nowhere,
) -> StepInputs:
    """`last_tokens` [max_rows + 1] int64 gives decode slices their token. Table writes must be in;
    `send` is called once."""
    slices = batch.slices
    rows_host = [piece.row for piece in slices]
    starts_host = [piece.start for piece in slices]
    lengths_host = [piece.length for piece in slices]
    rows = np.array(rows_host, dtype=np.int32)
    starts = np.array(starts_host, dtype=np.int32)
    lengths = np.array(lengths_host, dtype=np.int32)
    num_decode = next(
        (i for i, piece in enumerate(slices) if piece.tokens is not None), len(slices)
    )
    num_tokens = int(lengths.sum())
    positions, slots = _place(table, rows, starts, lengths, num_tokens, page_size)
    sampling = [piece for piece in slices if piece.sample]
    scoring = [piece for piece in slices if piece.targets and piece.prompt_logprobs is not None]
    windows = [piece.window for piece in slices]
    has_windows = any(windows)
    bases_host = [-1 if each is None else each.base for each in windows] if has_windows else []
    visible = _see(windows, lengths_host, positions) if has_windows else np.empty(0, np.int64)
    kept = _keep(slices, lengths)
    arrays: list[Array] = [
        rows,
        starts,
        lengths,
        slots,
        positions,
        np.array([piece.row for piece in sampling], dtype=np.int32),
        _given_tokens(slices[num_decode:], num_tokens - num_decode),
        np.empty(0, np.int64) if kept is None else kept,
        np.array(bases_host, dtype=np.int32),
        visible,
    ]
    sent = send(arrays)
    attention = AttentionBatch(
        num_decode=num_decode,
        page_size=page_size,
        page_table=table.tensor,
        rows=sent[0],
        starts=sent[1],
        lengths=sent[2],
        rows_host=rows_host,
        starts_host=starts_host,
        lengths_host=lengths_host,
        slots=sent[3],
        positions=sent[4],
        bases=sent[8] if has_windows else None,
        bases_host=bases_host,
        visible=sent[9] if has_windows else None,
    )
    relayed = last_tokens[attention.rows[:num_decode].long()] if num_decode else None
    parts = [part for part in (relayed, sent[6]) if part is not None and len(part)]
    return StepInputs(
        token_ids=parts[0] if len(parts) == 1 else torch.cat(parts),
        attention=attention,
        keep=None if kept is None else sent[7],
        sampling=sampling,
        sampling_rows=sent[5],
        scoring=scoring,
    )


def locate(
    slices: list[Slice], table: PageTable, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The position in its row and the slot in the pool of each of the slices' tokens, [T] int64 each."""
    rows, starts, lengths = (
        np.array(values, dtype=np.int32)
        for values in zip(*((each.row, each.start, each.length) for each in slices), strict=True)
    )
    positions, slots = _place(table, rows, starts, lengths, int(lengths.sum()), page_size)
    device = table.tensor.device
    return torch.from_numpy(positions).to(device), torch.from_numpy(slots).to(device)


def _place(
    table: PageTable, rows: Ints, starts: Ints, lengths: Ints, num_tokens: int, page_size: int
) -> tuple[Longs, Longs]:
    """Each token's position in its row and its slot in the pool."""
    if num_tokens == len(rows):
        positions = starts.astype(np.int64)
    else:
        first_token = np.cumsum(lengths) - lengths
        positions = np.arange(num_tokens) + np.repeat(starts - first_token, lengths)
        rows = np.repeat(rows, lengths)
    if page_size == 1:
        slots = table.host[rows, positions].astype(np.int64)
    else:
        pages, offsets = np.divmod(positions, page_size)
        slots = table.host[rows, pages].astype(np.int64) * page_size + offsets
    return positions, slots


def _see(windows: list[Window | None], lengths: list[int], positions: Longs) -> Longs:
    """The step's masks; puts the positions of tokens in windows in place."""
    visible = np.zeros(len(positions), dtype=np.int64)
    first = 0
    for window, length in zip(windows, lengths, strict=True):
        if window is not None:
            visible[first : first + length] = window.visible
            positions[first : first + length] = window.positions
        first += length
    return visible


def _given_tokens(slices: list[Slice], num_tokens: int) -> Longs:
    given = chain.from_iterable(piece.tokens or () for piece in slices)
    return np.fromiter(given, dtype=np.int64, count=num_tokens)


def _keep(slices: list[Slice], lengths: Ints) -> Longs | None:
    if all(
        piece.sample and piece.length == 1 + piece.draft and not piece.targets for piece in slices
    ):
        return None
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    chosen: list[int] = []
    for end, piece in zip(ends, slices, strict=True):
        if piece.sample:
            chosen.extend(range(end - 1 - piece.draft, end))
    for end, piece in zip(ends, slices, strict=True):
        if piece.prompt_logprobs is not None:
            first = end - piece.length
            chosen.extend(range(first, first + len(piece.targets)))
    if not chosen:  # kernels are not asked to run on nothing
        chosen = [0]
    return np.array(chosen, dtype=np.int64)
