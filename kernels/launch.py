"""How the Triton kernels are launched: in a chain without gaps, and with little work for the host.

With programmatic dependent launch a kernel's blocks start while the kernel before still runs, so that a
step of many short kernels does not pay a launch's latency for each. Every kernel keeps three rules, or
the chain is not safe:

1. `gdc_wait()` stands before its first read of anything that an earlier kernel may have written, and
   before its first write; only weights and constants are read earlier. It waits for the end of the
   kernel before, which has itself waited for the one before it.
2. `gdc_launch_dependents()` may stand anywhere, and early is best: it lets the next kernel's blocks in,
   and says nothing about this kernel's results.
3. Both stand behind a constexpr `PDL`, which the interpreter and older devices take as False.

A kernel is launched by a `Launcher`, or as `kernel[grid](..., **launch_options(device))`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from triton import JITFunction
    from triton.compiler import CompiledKernel

HOPPER = (9, 0)
ALIGNMENT = 16  # bytes; what the compiled kernels count on
ANY_INT = 3  # stands for all integers: Triton compiles specially for 1 and for multiples of 16
ANY_FLOAT = 0.5
FIRST_DTYPE = 4  # in the key of a compiled form


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


class Launcher:
    """Launches a kernel whose parameters are tensors, then 32-bit numbers, then constexprs, PDL last.

    Triton looks at every argument of every launch to choose among what it compiled, which takes the host
    three times as long as the launch. Here the choice is made by the types and the constants alone.
    """

    def __init__(self, kernel: JITFunction) -> None:
        self._kernel = kernel
        self._compiled: dict[object, CompiledKernel] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        numbers: tuple[int | float, ...],
        constants: tuple[object, ...],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        """On the current device and stream, where the first of the tensors must be."""
        first = tensors[0]
        assert first is not None
        device = first.device
        pointers: list[int | None] = []
        key: list[object] = [device, constants, num_warps, num_stages]
        low_bits = 0
        for tensor in tensors:
            if tensor is None:
                pointers.append(None)
                key.append(None)
            else:
                at = tensor.data_ptr()
                low_bits |= at
                pointers.append(at)
                key.append(tensor.dtype)
        if device.type != "cuda" or low_bits % ALIGNMENT:
            self._kernel[grid](
                *tensors,
                *numbers,
                *constants,
                num_warps=num_warps,
                num_stages=num_stages,
                **launch_options(device),
            )
            return
        form = tuple(key)
        compiled = self._compiled.get(form)
        if compiled is None:
            compiled = self._compiled[form] = self._kernel.warmup(
                *key[FIRST_DTYPE:],
                *(ANY_INT if isinstance(number, int) else ANY_FLOAT for number in numbers),
                *constants,
                grid=grid,
                num_warps=num_warps,
                num_stages=num_stages,
                **launch_options(device),
            )
        compiled.run(
            *grid,
            torch._C._cuda_getCurrentRawStream(device.index),
            compiled.function,
            compiled.packed_metadata,
            None,  # neither metadata nor hooks of a profiler
            None,
            None,
            *pointers,
            *numbers,
            *constants,
            True,  # the place of PDL, as of all constants, is read by nobody
        )


def next_power_of_two(number: int) -> int:
    """The smallest one that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
