"""The definition of right: looks only at the tokens of the history."""

from __future__ import annotations

import torch

from kernels.penalties import PROMPT


def penalize(
    logits: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    rates: torch.Tensor,
    history: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    ids = history[slots]
    flat = logits.view(-1)
    where = places[:, None] * logits.shape[1] + ids
    values = flat[where]
    counts = seen[slots[:, None], ids] & (PROMPT - 1)
    repetition, presence, frequency = rates[:, :1], rates[:, 1:2], rates[:, 2:]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts + presence * (counts > 0)
    flat[where] = values  # an id that stands in the history twice gets the same value twice


def remember(
    tokens: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    history: torch.Tensor,
    lengths: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    put_out = tokens[places]
    history[slots, lengths[slots]] = put_out
    lengths[slots] += 1
    seen[slots, put_out] += 1
