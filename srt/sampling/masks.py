"""Grammar masks: packed bits from the scheduler, applied to rows of logits."""

from __future__ import annotations

import numpy as np
import torch

from kernels.token_mask import Forbid
from kernels.transfer import send, send_list


def forbid_unmasked(logits: torch.Tensor, masks: list[bytes | None], forbid: Forbid) -> None:
    """In place, [S, V]: where row i's mask has no bit for a token, its logit becomes minus infinity.
    Bit `t % 8` of byte `t // 8` stands for token t; None leaves the row as it is. forbid: one that
    runs where the logits are."""
    places = [place for place, mask in enumerate(masks) if mask is not None]
    if not places:
        return
    joined = bytearray(b"".join(mask for mask in masks if mask is not None))
    packed = torch.from_numpy(np.frombuffer(joined, dtype=np.uint8)).view(len(places), -1)
    device = logits.device
    forbid(logits, send_list(places, torch.int64, device), send(packed, device))
