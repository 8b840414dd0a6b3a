"""The definition: `max` of each row."""

from __future__ import annotations

import torch


def best_token(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, tokens = logits.max(dim=-1)
    return values, tokens
