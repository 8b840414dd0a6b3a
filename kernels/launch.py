"""How the Triton kernels are launched: with programmatic dependent launch where the device has it.

With it a kernel's blocks start while the kernel before still runs, so that a step of many short kernels
does not pay a launch's latency for each. Every kernel keeps three rules, or the chain is not safe:

1. `gdc_wait()` stands before its first read of anything that an earlier kernel may have written, and
   before its first write; only weights and constants are read earlier. It waits for the end of the
   kernel before, which has itself waited for the one before it.
2. `gdc_launch_dependents()` may stand anywhere, and early is best: it lets the next kernel's blocks in,
   and says nothing about this kernel's results.
3. Both stand behind a constexpr `PDL`, which the interpreter and older devices take as False.

    kernel[grid](..., **launch_options(x.device))
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch

HOPPER = (9, 0)


@cache
def pdl_supported(device: torch.device) -> bool:
    """Compute capability 9.0 and newer. False for the CPU, where the kernels are interpreted."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= HOPPER


@cache
def launch_options(device: torch.device) -> Mapping[str, bool]:
    """Keyword arguments of a launch: the kernel's constexpr PDL and the launcher's launch_pdl."""
    if pdl_supported(device):
        return MappingProxyType({"PDL": True, "launch_pdl": True})
    return MappingProxyType({"PDL": False})
