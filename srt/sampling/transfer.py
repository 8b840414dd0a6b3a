"""Between host and device without waiting: by way of pinned memory, which torch hands out again only
when the copy is over."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[len(values)] on the device. Returns before the copy is done; work on the stream sees it."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def send_tensor(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same for a tensor on the host, of any shape."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def fetch(values: torch.Tensor) -> torch.Tensor:
    """The same numbers in the host's memory. They are there when the stream has come so far; wait for
    an event recorded after this call before you read them."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
