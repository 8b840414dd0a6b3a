"""python -m bench.kernels.silu_mul"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.candidates import BF16, Sizes, load
from bench.timing import report


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    for tokens in (1, 8, 32, 256):
        gate_up = torch.randn(tokens, 2 * Sizes().ffn).to(BF16)
        yield (
            f"{tokens} tokens",
            {name: partial(ops.silu_mul, gate_up) for name, ops in load().items()},
        )


if __name__ == "__main__":
    report("silu_mul", cases())
