"""python -m bench.kernels.rope: rotation of q and k, and the writes into the KV planes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.candidates import BF16, Sizes, load
from bench.timing import report


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    sizes = Sizes()
    cos_sin = torch.randn(2048, sizes.head_dim)
    k_plane, v_plane = torch.zeros(2, 4096, sizes.kv_heads, sizes.head_dim, dtype=BF16)
    for tokens in (1, 8, 32, 256):
        qkv = torch.randn(tokens, sizes.qkv).to(BF16)
        positions, slots = torch.randint(0, 2048, (tokens,)), torch.randperm(4096)[:tokens]
        shape = (sizes.heads, sizes.kv_heads, sizes.head_dim)
        arguments = (qkv, positions, cos_sin, slots, k_plane, v_plane, *shape)
        yield (
            f"{tokens} tokens",
            {name: partial(ops.rope_write_kv, *arguments) for name, ops in load().items()},
        )


if __name__ == "__main__":
    report("rope", cases())
