"""Between host and device without waiting: by way of pinned memory, which torch hands out again only
when the copy is over. On a CPU nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Numbers = np.ndarray[Any, Any] | torch.Tensor  # on the host


def pin(values: Numbers, device: torch.device) -> torch.Tensor:
    """On the host still, where a copy to `device` may read it later: pinned memory is not used again
    before the copies out of it are through, other memory may be."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(values: Numbers, device: torch.device) -> torch.Tensor:
    """The same on the device. Returns before the copy is done; work on the stream sees it."""
    return pin(values, device).to(device, non_blocking=True)


def send_list(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[len(values)] on the device, like `send`."""
    is_pinned = device.type == "cuda"
    host = torch.tensor(values, dtype=dtype, pin_memory=is_pinned)
    return host.to(device, non_blocking=True)


def fetch(values: torch.Tensor) -> torch.Tensor:
    """The same numbers in the host's memory. They are there when the stream has come so far; wait for
    an event recorded after this call before you read them."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
