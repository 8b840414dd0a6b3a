"""For which decode batch sizes a CUDA graph is captured. A batch is padded up to the next size."""

from __future__ import annotations

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.facts import GpuFacts
from srt.errors import ConfigError

NOT_CAPTURED = ("sdpa",)  # its plans are host lists, made anew for each step
SMALL = (1, 2, 4, 8)
STEPS = ((64, 8), (128, 16), (512, 32))  # (up to, every)

Sizes = tuple[tuple[int, ...], str, str]  # sizes, source, reason


def decide_graphs(
    args: ServerArgs, gpu: GpuFacts | None, decode: str, rows: int, decisions: Decisions
) -> Sizes:
    """rows: requests that run at once. Raises ConfigError for sizes that cannot be captured."""
    asked = args.cuda_graph_sizes
    sizes = () if asked is None else tuple(sorted({size for size in asked if size != 0}))
    lack = None
    if gpu is None:
        lack = "a CPU runs eagerly"
    elif decode in NOT_CAPTURED:
        lack = f"decode attention {decode} cannot be captured"
    if asked is None:
        if lack is not None:
            return (), "rule", lack
        return (
            default_sizes(rows),
            "rule",
            f"every decode batch up to {rows} requests, padded a little",
        )
    if sizes and lack is not None:
        raise ConfigError(
            f"--cuda-graph-sizes {_words(sizes)} was asked for, but {lack}; allowed: 0, or leave it out"
        )
    if sizes and (sizes[0] < 0 or sizes[-1] > rows):
        raise ConfigError(
            f"--cuda-graph-sizes {_words(sizes)} was asked for, but a decode step has 1 to {rows} "
            f"requests (--max-running); allowed: sizes from 1 to {rows}"
        )
    source, reason = decisions.asked("cuda_graph_sizes")
    return sizes, source, reason


def default_sizes(rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8 to 64, every 16 to 128, every 32 to 512; none above `rows`, and `rows`
    itself if it is no more than 512: larger batches take long enough to launch them eagerly."""
    sizes, low = list(SMALL), SMALL[-1]
    for most, step in STEPS:
        sizes += range(low + step, most + 1, step)
        low = most
    last = min(rows, low)
    return (*(size for size in sizes if size < last), last)


def _words(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))
