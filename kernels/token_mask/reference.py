"""The definition of right, bit by bit."""

from __future__ import annotations

import torch


def forbid(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    bits = (masks[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=masks.device)) & 1
    is_forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits[places] = logits[places].masked_fill_(is_forbidden, float("-inf"))
