"""python -m bench.kernels.rms_norm: the norm after a residual addition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.candidates import BF16, Sizes, load
from bench.timing import report


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    hidden = Sizes().hidden
    for tokens in (1, 8, 32, 256):
        x, weight = torch.randn(tokens, hidden).to(BF16), torch.randn(hidden).to(BF16)
        residual = torch.zeros_like(x)
        yield (
            f"{tokens} tokens",
            {
                name: partial(ops.add_rms_norm, x, residual, weight, 1e-5)
                for name, ops in load().items()
            },
        )


if __name__ == "__main__":
    report("rms_norm", cases())
