"""Grammar masks: packed bits from the scheduler, applied to rows of logits."""

from __future__ import annotations

import numpy as np
import torch


def forbid_unmasked(logits: torch.Tensor, masks: list[bytes | None]) -> None:
    """In place, [S, V]: where row i's mask has no bit for a token, its logit becomes minus infinity.
    Bit `t % 8` of byte `t // 8` stands for token t; None leaves the row as it is."""
    places = [place for place, mask in enumerate(masks) if mask is not None]
    if not places:
        return
    vocab_size = logits.shape[1]
    packed = np.frombuffer(b"".join(mask for mask in masks if mask is not None), dtype=np.uint8)
    bits = np.unpackbits(
        packed.reshape(len(places), -1), axis=1, count=vocab_size, bitorder="little"
    )
    is_forbidden = torch.from_numpy(bits).to(logits.device) == 0
    if len(places) == len(masks):
        logits.masked_fill_(is_forbidden, float("-inf"))
    else:
        logits[places] = logits[places].masked_fill_(is_forbidden, float("-inf"))
