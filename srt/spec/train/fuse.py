"""Chains of elementwise operations as single kernels on a GPU, and as they are written elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def fuse(function: Callable[..., T]) -> Callable[..., T]:
    """The function's first argument is a tensor; where that is on a GPU, torch.compile's version runs.
    Nothing is compiled before the first such call."""

    @cache
    def compiled() -> Callable[..., T]:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def call(first: torch.Tensor, *others: Any) -> T:
        return (compiled() if first.is_cuda else function)(first, *others)

    return call
