"""What a sum over GPUs costs in a decode step: NCCL against direct sums, in a recorded graph as the
engine runs them, 64 in a row, each with the kernel behind it that empties the tensor.

    python -m bench.kernels.rank_sums --ranks 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from srt.launch.supervisor import loopback_only
from srt.parallel.collective import Ranks, open_group
from srt.parallel.direct import open_direct
from srt.runner.timeline import Timeline, open_timeline

IN_A_ROW = 64
REPEATS = 20
HIDDEN = 4096
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)


def measure(rank: int, size: int, kind: str, folder: Path) -> None:
    os.environ.update(loopback_only() | os.environ)
    group = open_group(rank, size, kind, folder / "meeting")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    timeline = open_timeline(device)
    measure_group("library", group, device, timeline)
    world = torch.distributed.group.WORLD
    if kind == "cuda" and world is not None:
        direct = open_direct(world, device)
        if direct is not None:
            measure_group("direct", Ranks(world, device, direct), device, timeline)
    timeline.forget()
    group.close()


def measure_group(name: str, group: Ranks, device: torch.device, timeline: Timeline) -> None:
    for rows in ROWS:
        x = torch.ones(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        run = timeline.capture(partial(add_often, group, x))
        seconds = time_of(run, timeline)
        x.fill_(1)
        group.add(x)
        assert torch.equal(x, torch.full_like(x, group.size)), (name, rows)
        if group.rank == 0:
            micros = seconds / IN_A_ROW * 1e6
            rate = x.nbytes / micros / 1e3
            print(f"{name:<8} {rows:>5} x {HIDDEN}: {micros:8.2f} us {rate:8.1f} GB/s", flush=True)


def add_often(group: Ranks, x: torch.Tensor) -> None:
    for _ in range(IN_A_ROW):
        group.add(x)
        x.mul_(0)  # a kernel between two sums, as in a model


def time_of(run: Callable[[], None], timeline: Timeline) -> float:
    """Median seconds of a replay."""
    times = []
    for _ in range(REPEATS):
        began = timeline.mark()
        run()
        ended = timeline.mark()
        ended.wait()
        times.append(ended.seconds_since(began))
    return median(times)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.rank_sums", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=measure, args=(r, options.ranks, options.device, Path(folder)))
            for r in range(options.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
    return 0 if codes == [0] * options.ranks else 1


if __name__ == "__main__":
    sys.exit(main())
