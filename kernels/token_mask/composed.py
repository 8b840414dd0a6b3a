"""On a CPU, with numpy's unpacking of bits."""

from __future__ import annotations

import numpy as np
import torch


def forbid(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    bits = np.unpackbits(masks.numpy(), axis=1, count=logits.shape[1], bitorder="little")
    is_forbidden = torch.from_numpy(bits) == 0
    if len(places) == len(logits):  # all lines, and in their order
        logits.masked_fill_(is_forbidden, float("-inf"))
    else:
        logits[places] = logits[places].masked_fill_(is_forbidden, float("-inf"))
