"""Grammar masks: packed bits from the scheduler, applied to rows of logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from srt.sampling.transfer import send, send_tensor


def forbid_unmasked(logits: torch.Tensor, masks: list[bytes | None]) -> None:
    """In place, [S, V]: where row i's mask has no bit for a token, its logit becomes minus infinity.
    Bit `t % 8` of byte `t // 8` stands for token t; None leaves the row as it is."""
    places = [place for place, mask in enumerate(masks) if mask is not None]
    if not places:
        return
    vocab_size = logits.shape[1]
    joined = bytearray(b"".join(mask for mask in masks if mask is not None))
    packed = np.frombuffer(joined, dtype=np.uint8).reshape(len(places), -1)
    is_forbidden = _unpack(packed, vocab_size, logits.device) == 0
    if len(places) == len(masks):
        logits.masked_fill_(is_forbidden, float("-inf"))
    else:
        index = send(places, torch.int64, logits.device)
        logits[index] = logits[index].masked_fill_(is_forbidden, float("-inf"))


def _unpack(packed: npt.NDArray[np.uint8], num: int, device: torch.device) -> torch.Tensor:
    """The first `num` bits of each line, [P, num] uint8. Another device gets them packed: it unpacks
    faster than the way there is wide."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=num, bitorder="little"))
    there = send_tensor(torch.from_numpy(packed), device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return ((there[:, :, None] >> shifts) & 1).flatten(1)[:, :num]
