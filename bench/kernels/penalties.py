"""python -m bench.kernels.penalties: on the GPU, after a check, beside the reference there.

`floor` is the time to read the counts once at the copy bandwidth measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.kernels.device import memory_bandwidth, microseconds
from kernels.penalties import PROMPT, select

VOCAB = 151936
PROMPT_LEN, OUTPUT_LEN = 1000, 500


def make(num: int) -> tuple[torch.Tensor, ...]:
    """Logits, places, slots, rates, history, seen."""
    history = torch.randint(0, VOCAB, (num, PROMPT_LEN + OUTPUT_LEN), device="cuda")
    seen = torch.zeros(num, VOCAB, dtype=torch.int32, device="cuda")
    seen.scatter_(1, history[:, :PROMPT_LEN], PROMPT)
    output = history[:, PROMPT_LEN:]
    seen.scatter_add_(1, output, torch.ones_like(output, dtype=torch.int32))
    places = torch.randperm(num, device="cuda")
    rates = torch.rand(num, 3, device="cuda") + 0.5
    return torch.randn(num, VOCAB, device="cuda"), places, places, rates, history, seen


def check(num: int) -> None:
    logits, *rest = make(num)
    expected = logits.clone()
    select("triton").penalize(logits, *rest)
    select("reference").penalize(expected, *rest)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def lines() -> Iterator[str]:
    bandwidth = memory_bandwidth()
    for num in (1, 32, 256):
        check(num)
        given = make(num)
        taken = {
            name: microseconds([partial(select(name).penalize, *given)])
            for name in ("triton", "reference")
        }
        floor = num * VOCAB * 4 / bandwidth * 1e6
        times = "  ".join(f"{name} {each:8.1f} us" for name, each in taken.items())
        yield f"penalties V {VOCAB}  P {num:3}  {times}  floor {floor:6.1f} us"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
