"""Numbers made on the host go to the device without anybody waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def pin(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """On the host still, where a copy to `device` may read it later: pinned memory is not used again
    before the copies out of it are through, other memory may be."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, in the order of its stream."""
    return pin(array, device).to(device, non_blocking=True)
