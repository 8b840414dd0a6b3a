"""How the Triton kernels are launched: in a chain without gaps, and with little work for the host.

With programmatic dependent launch a kernel's blocks start while the kernel before still runs, so that a
step of many short kernels does not pay a launch's latency for each. Every kernel keeps three rules, or
the chain is not safe:

1. `gdc_wait()` stands before its first read of anything that an earlier kernel may have written, and
   before its first write; only weights and constants are read earlier. It waits for the end of the
   kernel before, which has itself waited for the one before it. (Where the kernel before lets it in
   behind its own wait, what was there for that one may be read, too: `kernels.moe.few`.)
2. `gdc_launch_dependents()` may stand anywhere, and early is best: it lets the next kernel's blocks in,
   and says nothing about this kernel's results.
3. Both stand behind a constexpr `PDL`, which the interpreter and older devices take as False.

A kernel is launched by a `Launcher`, or as `kernel[grid](..., **launch_options(device))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from triton import JITFunction
    from triton.compiler import CompiledKernel

HOPPER = (9, 0)
ALIGNMENT = 16  # bytes; what the compiled kernels count on
ANY_INT = 3  # stands for all integers: Triton compiles specially for 1 and for multiples of 16
ANY_FLOAT = 0.5
FIRST_DTYPE = 3  # in the name of a form


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


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of it that a program can have. Of a CPU, where kernels are interpreted, what Hopper has."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


class Form(NamedTuple):
    """A kernel compiled for some types and constants, and what its launches have in common."""

    launch: Callable[..., object]
    function: int
    given: tuple[object, ...]  # between the function and the kernel's own arguments
    device_index: int


class Launcher:
    """Launches a kernel on one device. Its parameters are tensors, then 32-bit numbers, then constexprs,
    PDL last.

    Triton looks at every argument of every launch to choose among what it compiled, which takes the host
    three times as long as the launch. Here the choice is made by the types and the constants alone.
    """

    def __init__(self, kernel: JITFunction) -> None:
        self._kernel = kernel
        self._forms: dict[tuple[object, ...], Form] = {}

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
        """On the current stream. The first of the tensors is there."""
        pointers: list[int] = []
        key: list[object] = [constants, num_warps, num_stages]
        low_bits = 0
        for tensor in tensors:
            if tensor is None:
                pointers.append(0)
                key.append(None)
            else:
                at = tensor.data_ptr()
                low_bits |= at
                pointers.append(at)
                key.append(tensor.dtype)
        name = tuple(key)
        form = self._forms.get(name)
        if form is None or low_bits % ALIGNMENT:
            first = tensors[0]
            assert first is not None
            options = {"num_warps": num_warps, "num_stages": num_stages}
            options |= launch_options(first.device)
            if first.device.type != "cuda" or low_bits % ALIGNMENT:
                self._kernel[grid](*tensors, *numbers, *constants, **options)
                return
            alike = [ANY_INT if isinstance(number, int) else ANY_FLOAT for number in numbers]
            dtypes = name[FIRST_DTYPE:]
            compiled = self._kernel.warmup(*dtypes, *alike, *constants, grid=grid, **options)
            form = self._forms[name] = take_form(compiled, first.device.index)
        launch, function, given, device_index = form
        stream = torch._C._cuda_getCurrentRawStream(device_index)
        # Nobody reads what stands in the places of the constants.
        launch(*grid, stream, function, *given, *pointers, *numbers, *constants, True)


def take_form(compiled: CompiledKernel, device_index: int) -> Form:
    """Loads it. Neither launch metadata nor a profiler's hooks are given."""
    run = compiled.run
    nothing = (None, None, None)
    if run.global_scratch_size or run.profile_scratch_size:
        given: tuple[object, ...] = (compiled.packed_metadata, *nothing)
        return Form(run, compiled.function, given, device_index)
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    given = (*flags, None, None, compiled.packed_metadata, *nothing)
    return Form(run.launch, compiled.function, given, device_index)


def next_power_of_two(number: int) -> int:
    """The smallest one that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
