"""python -m bench.kernels.paged_attention: decode batches, prefill chunks, both in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.candidates import BF16, Sizes, load
from bench.timing import report

PAGE_SIZE = 16
CASES = {
    "decode 1 x 125": ([125], [1]),
    "decode 8 x 125": ([125] * 8, [1] * 8),
    "decode 32 x 125": ([125] * 32, [1] * 32),
    "decode 1 x 4000": ([4000], [1]),
    "verify 5 after 200": ([200], [5]),
    "prefill 512": ([0], [512]),
    "prefill 256 after 3744": ([3744], [256]),
    "prefill 256 + decode 32 x 125": ([125] * 32 + [500], [1] * 32 + [256]),
}


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    sizes = Sizes()
    for case, (starts, lengths) in CASES.items():
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        max_pages = -(-max(ends) // PAGE_SIZE)
        table = torch.randperm(len(ends) * max_pages).view(-1, max_pages).int()
        planes = torch.randn(
            2, table.numel() * PAGE_SIZE, sizes.kv_heads, sizes.head_dim, dtype=BF16
        )
        q = torch.randn(sum(lengths), sizes.heads, sizes.head_dim, dtype=BF16)
        rows = torch.arange(len(ends), dtype=torch.int32)
        where = (torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32))
        arguments = (q, *planes, table, rows, *where, PAGE_SIZE, sizes.head_dim**-0.5, None)
        yield (
            case,
            {name: partial(ops.paged_attention, *arguments) for name, ops in load().items()},
        )


if __name__ == "__main__":
    report("paged_attention", cases())
