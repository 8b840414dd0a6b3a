"""python -m bench.kernels.sample [--quick]: drawing tokens on the GPU, after a check.

Times are of launches in a CUDA graph over logits that the L2 cache cannot hold. `floor` is the time to
read the logits once at the copy bandwidth measured. `host` is what a launch costs the launching thread.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field

import torch

from bench.kernels.device import memory_bandwidth, microseconds
from kernels.sample import select
from kernels.sample.table import Drawn, table_row

SIZES = (1, 32, 256)
VOCABS = (128256, 151936)
ROTATED_BYTES = 200e6
CHECKED = 16  # lines a case


@dataclass(frozen=True, slots=True)
class Case:
    """`rules` of the rows in turn. `scale`: of the logits' noise; models are peaked, like 4, not 1."""

    name: str
    rules: tuple[dict[str, float], ...]
    scale: float = 4.0
    dtype: torch.dtype = field(default=torch.float32)


CASES = (
    Case("greedy", ({"temperature": 0.0},)),
    Case("temperature", ({},)),
    Case("temperature bf16", ({},), dtype=torch.bfloat16),
    Case("top_k 50", ({"top_k": 50},)),
    Case("top_p 0.9", ({"top_p": 0.9},)),
    Case("top_p 0.9 flat", ({"top_p": 0.9},), scale=1.0),
    Case("min_p 0.05", ({"min_p": 0.05},)),
    Case("top_k 50 top_p 0.9", ({"top_k": 50, "top_p": 0.9},)),
    Case("mixed", ({"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.9})),
)


def make_table(case: Case, num: int) -> torch.Tensor:
    rng = random.Random(num)
    default = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    rows = [
        table_row(
            generated=rng.randrange(1000),
            seed=rng.getrandbits(64),
            **{**default, **case.rules[row % len(case.rules)]},  # type: ignore[arg-type]
        )
        for row in range(num)
    ]
    return torch.tensor(rows, device="cuda")


def check(case: Case, logits: torch.Tensor, rows: torch.Tensor, table: torch.Tensor) -> int:
    """How many lines draw another token than the reference. A draw in a million may, by the last bit
    of a weight; floors may differ where a weight at the border does."""
    found, expected = (Drawn.empty(len(rows), logits.device) for _ in range(2))
    select("triton")(logits, rows, table.clone(), found)
    select("reference")(logits, rows, table.clone(), expected)
    assert torch.equal(found.peaks, expected.peaks), case.name
    return int((found.tokens != expected.tokens).sum())


def measure(case: Case, vocab: int, size: int, bandwidth: float) -> str:
    sample = select("triton")
    copies = max(2, round(ROTATED_BYTES / (size * vocab * case.dtype.itemsize)))
    if size == 1:
        copies = min(copies, 64)
    logits = [
        (torch.randn(size, vocab, device="cuda") * case.scale).to(case.dtype) for _ in range(copies)
    ]
    rows = torch.arange(size, device="cuda", dtype=torch.int32)
    table, drawn = make_table(case, size), Drawn.empty(size, torch.device("cuda"))
    num = min(size, CHECKED)
    wrong = check(case, logits[0][:num], rows[:num].clone(), table)
    calls = [lambda lines=lines: sample(lines, rows, table, drawn) for lines in logits]
    taken = microseconds(calls)
    began = time.perf_counter()
    for _ in range(50):
        calls[0]()
    host = (time.perf_counter() - began) / 50 * 1e6
    torch.cuda.synchronize()
    num_bytes = size * vocab * case.dtype.itemsize
    floor = num_bytes / bandwidth * 1e6
    return (
        f"{case.name:20} V {vocab:6}  S {size:3}  {taken:8.1f} us  floor {floor:6.1f} us  "
        f"{num_bytes / taken / 1e6:5.2f} TB/s  host {host:5.1f} us  "
        f"{wrong} of {num} unlike the reference"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the larger vocabulary only")
    args = parser.parse_args()
    torch.manual_seed(time.time_ns())
    bandwidth = memory_bandwidth()
    for case in CASES:
        for vocab in VOCABS[1:] if args.quick else VOCABS:
            for size in SIZES:
                print(measure(case, vocab, size, bandwidth), flush=True)


if __name__ == "__main__":
    main()
