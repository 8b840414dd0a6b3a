"""python -m bench.kernels.token_mask: on the GPU, after a check, beside the reference there.

`floor` is the time to write the logits that are forbidden at the copy bandwidth measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.kernels.device import memory_bandwidth, microseconds
from kernels.token_mask import select

VOCAB = 151936


def lines() -> Iterator[str]:
    bandwidth = memory_bandwidth()
    for num in (1, 32, 256):
        logits = torch.randn(num, VOCAB, device="cuda")
        masks = torch.zeros(num, VOCAB // 8, dtype=torch.uint8, device="cuda")
        masks[:, ::50] = torch.randint(0, 256, masks[:, ::50].shape, device="cuda").byte()
        places = torch.arange(num, device="cuda")
        found, expected = logits.clone(), logits.clone()
        select("triton")(found, places, masks)
        select("reference")(expected, places, masks)
        assert torch.equal(found, expected)
        taken = {
            name: microseconds([partial(select(name), logits, places, masks)])
            for name in ("triton", "reference")
        }
        floor = num * VOCAB * 4 / bandwidth * 1e6
        times = "  ".join(f"{name} {each:8.1f} us" for name, each in taken.items())
        yield f"token_mask V {VOCAB}  P {num:3}  {times}  floor {floor:6.1f} us"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
