"""What every op offers: the implementations by name, and what a choice that cannot be met raises.

reference  plain torch in float32: the definition of right
torch      few torch calls; oneDNN prepacked weights for the linears. Any CPU, any dtype
native     our C code, bfloat16 only; needs a `Library` from `kernels.native_build.build`
triton     our Triton code: an NVIDIA GPU, or the CPU under Triton's interpreter (TRITON_INTERPRET=1)
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, NoReturn

if TYPE_CHECKING:
    import torch

    from kernels.native_build import Library

Implementation = Literal["reference", "torch", "native", "triton"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "torch", "native", "triton")


def require_library(library: Library | None) -> Library:
    if library is None:
        raise ValueError(
            "implementation 'native' needs library=, the result of kernels.native_build.build; "
            "without a compiler use implementation 'torch'"
        )
    return library


def require_triton() -> None:
    """Before the import of a module that holds Triton kernels."""
    if find_spec("triton") is None:
        raise ValueError(
            "implementation 'triton' needs the package triton, which is not installed; "
            "without it use implementation 'torch'"
        )


def refuse_implementation(implementation: str) -> NoReturn:
    raise ValueError(
        f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, not {implementation!r}"
    )


def check_native_dtype(implementation: str, **tensors: torch.Tensor | None) -> None:
    """The native kernels read bfloat16 rows that lie next to each other, and nothing else."""
    if implementation != "native":
        return
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if str(tensor.dtype) != "torch.bfloat16":
            raise ValueError(
                f"{name} is {tensor.dtype}; implementation 'native' takes torch.bfloat16 only, "
                "use implementation 'torch'"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous for implementation 'native'")


def check_triton_layout(implementation: str, **tensors: torch.Tensor | None) -> None:
    """The Triton kernels index rows that lie next to each other."""
    if implementation != "triton":
        return
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous for implementation 'triton'")


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """None means any size."""
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, found, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], not {list(found)}")


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, not {tensor.dtype}")
