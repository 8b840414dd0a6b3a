"""Torch alone. `max` is slow where it must find places, `amax` is not: so the block that holds the
largest value first, then the place in it."""

from __future__ import annotations

import torch

BLOCK = 64


def best_token(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    vocab_size = logits.shape[1]
    num_whole = vocab_size // BLOCK
    if num_whole == 0:
        values, tokens = logits.max(dim=-1)
        return values, tokens
    peaks = torch.unflatten(logits[:, : num_whole * BLOCK], 1, (num_whole, BLOCK)).amax(-1)
    if num_whole * BLOCK < vocab_size:
        rest = logits[:, num_whole * BLOCK :].amax(-1, keepdim=True)
        peaks = torch.cat([peaks, rest], dim=1)
    values, blocks = peaks.max(dim=-1)
    # The last block may be short; look at the last 64 ids then. Those before the block cannot hold the
    # same value, or their own block would have been chosen.
    starts = (blocks * BLOCK).clamp_max_(vocab_size - BLOCK)
    window = starts[:, None] + torch.arange(BLOCK, device=logits.device)
    return values, starts + logits.gather(1, window).argmax(-1)
