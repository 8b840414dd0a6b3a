"""From a step's plain numbers to the tensors a model reads. No Python per token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from srt.protocols.attention import AttentionBatch
from srt.protocols.forward_batch import ForwardBatch, Slice, Window
from srt.runner.page_table import PageTable


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """`keep` names the tokens whose hidden states are wanted: first the last 1 + draft tokens of each
    sampling slice, then those whose successors' logprobs are asked for. None: every token, in order."""

    token_ids: torch.Tensor  # [T] int64
    attention: AttentionBatch
    keep: torch.Tensor | None  # [K] int64
    sampling: list[Slice]
    scoring: list[Slice]


def build_inputs(
    batch: ForwardBatch, table: PageTable, last_tokens: torch.Tensor, page_size: int
) -> StepInputs:
    """`last_tokens` [max_rows] int64 gives decode slices their token. Table writes must be in."""
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
    device = table.tensor.device
    windows = [piece.window for piece in slices]
    visible = _see(windows, lengths_host, positions) if any(windows) else None
    bases_host = [-1 if each is None else each.base for each in windows] if any(windows) else []
    attention = AttentionBatch(
        num_decode=num_decode,
        page_size=page_size,
        page_table=table.tensor,
        rows=torch.from_numpy(rows).to(device),
        starts=torch.from_numpy(starts).to(device),
        lengths=torch.from_numpy(lengths).to(device),
        rows_host=rows_host,
        starts_host=starts_host,
        lengths_host=lengths_host,
        slots=torch.from_numpy(slots).to(device),
        positions=torch.from_numpy(positions).to(device),
        bases=None if visible is None else torch.tensor(bases_host, dtype=torch.int32).to(device),
        bases_host=bases_host,
        visible=None if visible is None else torch.from_numpy(visible).to(device),
    )
    sampling = [piece for piece in slices if piece.sample]
    scoring = [piece for piece in slices if piece.targets and piece.prompt_logprobs is not None]
    return StepInputs(
        token_ids=_token_ids(slices, attention, last_tokens, num_tokens),
        attention=attention,
        keep=_keep(slices, lengths, device),
        sampling=sampling,
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
    table: PageTable,
    rows: np.ndarray[tuple[int], np.dtype[np.int32]],
    starts: np.ndarray[tuple[int], np.dtype[np.int32]],
    lengths: np.ndarray[tuple[int], np.dtype[np.int32]],
    num_tokens: int,
    page_size: int,
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
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


def _see(
    windows: list[Window | None],
    lengths: list[int],
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The step's masks; puts the positions of tokens in windows in place."""
    visible = np.zeros(len(positions), dtype=np.int64)
    first = 0
    for window, length in zip(windows, lengths, strict=True):
        if window is not None:
            visible[first : first + length] = window.visible
            positions[first : first + length] = window.positions
        first += length
    return visible


def _token_ids(
    slices: list[Slice], attention: AttentionBatch, last_tokens: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    num_decode = attention.num_decode
    relayed = last_tokens[attention.rows[:num_decode].long()]
    if num_decode == len(slices):
        return relayed
    given = chain.from_iterable(piece.tokens or () for piece in slices[num_decode:])
    typed = np.fromiter(given, dtype=np.int64, count=num_tokens - num_decode)
    return torch.cat((relayed, torch.from_numpy(typed).to(relayed.device)))


def _keep(
    slices: list[Slice],
    lengths: np.ndarray[tuple[int], np.dtype[np.int32]],
    device: torch.device,
) -> torch.Tensor | None:
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
    return torch.tensor(chosen, dtype=torch.int64, device=device)
