"""python -m bench.kernels.linear: all linears of a model and its head, bf16 and int8.

All of them in turn, as in a step: one alone would stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.candidates import BF16, Sizes, load
from bench.timing import report
from kernels.linear import Linear


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    sizes = Sizes()
    layer = [
        (sizes.qkv, sizes.hidden),
        (sizes.hidden, sizes.heads * sizes.head_dim),
        (2 * sizes.ffn, sizes.hidden),
        (sizes.hidden, sizes.ffn),
    ]
    weights = [torch.randn(shape).to(BF16) for shape in layer * sizes.layers]
    weights.append(torch.randn(sizes.vocab, sizes.hidden).to(BF16))
    packed = {
        f"{name} {quantization or 'bf16'}": [
            ops.pack_linear(weight, quantization=quantization) for weight in weights
        ]
        for name, ops in load(with_reference=False).items()
        for quantization in (None, "int8")
    }
    for tokens in (1, 8, 32, 128, 512):
        xs = {size: torch.randn(tokens, size).to(BF16) for _, size in layer}
        yield (
            f"{tokens} tokens",
            {
                name: partial(run, linears, [xs[weight.shape[1]] for weight in weights])
                for name, linears in packed.items()
            },
        )


def run(linears: list[Linear], inputs: list[torch.Tensor]) -> None:
    for linear, x in zip(linears, inputs, strict=True):
        linear(x)


if __name__ == "__main__":
    report("linear", cases())
