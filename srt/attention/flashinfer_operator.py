"""FlashInfer compiles an operator where it is first planned, for a minute or two. Whoever gets ready
wants to say so before that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

HOPPER = (9, 0)


def kernel_of(device: torch.device) -> str:
    """Which of FlashInfer's prefill kernels a GPU gets."""
    return "fa3" if torch.cuda.get_device_capability(device) == HOPPER else "fa2"


def have_prefill(
    query_dim: int,
    value_dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    show: Callable[[str, float | None], None],
) -> None:
    """Compiles the prefill of these heads unless that is done. `dtypes`: of queries and of the cache."""
    from flashinfer.jit import gen_batch_prefill_module

    query, cache = dtypes
    # no rotation, window, cap; sums in float32
    sizes = (query_dim, value_dim, 0, False, False, False)
    operator = gen_batch_prefill_module(kernel_of(device), query, cache, query, torch.int32, *sizes)
    _compile(operator, f"prefill of heads of {query_dim} and {value_dim}", show)


def have_absorbed(
    rank: int,
    rope: int,
    dtype: torch.dtype,
    device: torch.device,
    show: Callable[[str, float | None], None],
) -> None:
    """The same of MLA over latents of `rank` numbers and rotated keys of `rope`."""
    from flashinfer.jit import gen_batch_mla_module

    sizes = (rank, rope, False)  # no profiler
    operator = gen_batch_mla_module(kernel_of(device), dtype, dtype, dtype, torch.int32, *sizes)
    _compile(operator, f"MLA of latents of {rank} and {rope}", show)


def _compile(operator: Any, what: str, show: Callable[[str, float | None], None]) -> None:
    if operator.is_compiled:
        return
    name = f"compile: flashinfer's {what}"
    show(f"{name}, a minute or two", None)
    began = time.monotonic()
    operator.build_and_load()
    show(f"{name}, {time.monotonic() - began:.1f} s", None)
