"""The definition of right."""

from __future__ import annotations

import torch


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
    index, places = rows.long(), starts.long()
    token_ids.copy_(last_tokens[index])
    positions.copy_(places)
    pages = page_table[index, places // page_size].long()
    slots.copy_(pages * page_size + places % page_size)


def write_table(page_table: torch.Tensor, where: torch.Tensor, pages: torch.Tensor) -> None:
    page_table.view(-1)[where.long()] = pages


def remember(last_tokens: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    last_tokens[rows.long()] = tokens
