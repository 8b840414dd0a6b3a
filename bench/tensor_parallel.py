"""One model on one GPU and divided among several: the same tokens, and what a step costs.

    python -m bench.tensor_parallel                    1 and 2 GPUs, the 8B shape with weights of noise
    python -m bench.tensor_parallel --sizes 1,2,4 --shape qwen3-14b
    python -m bench.tensor_parallel --device cpu       the same in small, to try it out

Where there are GPUs, every number above one is measured twice: sums by NCCL, and small ones directly
(`--rank-sums direct`).

First a small model in float32 answers the same prompts every way, greedy and drawn: the tokens must be
the same (exit code 1 if not). In bfloat16 the parts of a sum are rounded before they are added, so a
large model may choose another token where two are about as likely; whether it did is shown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from bench.gpu.child import Job
from bench.gpu.engines import run_job
from bench.gpu.figures import compare
from bench.gpu.folder import read_shape, shape_names, write_folder
from bench.gpu.sets import FULL, SMALL, Sizes
from bench.report import describe_machine
from srt.cli.options import cache_folder

DIRECT = ("--rank-sums", "direct")
Found = dict[str, dict[str, Any]]
Ways = dict[str, tuple[int, tuple[str, ...]]]
PARTS = ("build", "check", "warm", "batch1", "ttft", "decode", "offline")


def measure(
    name: str, flags: list[str], parts: tuple[str, ...], sizes: Sizes, limit: float
) -> Found:
    """An engine in a process of its own, ended after `limit` seconds: figures or an error by part. Says
    when each is done, and when the process has ended."""
    job = Job(
        flags=flags, cache_folder=cache_folder(), parts=list(parts), sizes=sizes, limit=limit / 2
    )
    began = time.monotonic()

    def say(word: str) -> None:
        print(f"{name}, {time.monotonic() - began:.0f} s: {word}", flush=True)

    found: Found = {}
    for part, figures in run_job(job, limit):
        found[part] = figures
        say(f"{part}: {figures['error']}" if "error" in figures else part)
    say("ended")
    return found


def flags_for(model: Path, size: int, device: str, sizes: Sizes, more: list[str]) -> list[str]:
    return [
        *("--model", str(model), "--load-format", "dummy", "--device", device, "--seed", "1"),
        *("--disable-radix-cache", "--max-running", str(sizes.max_running)),
        *("--log-level", "warning", "--tensor-parallel-size", str(size), *more),
    ]


def ways(options: argparse.Namespace) -> Ways:
    """By name: the number of ranks, and flags. The first is what the others are compared with."""
    plain: Ways = {str(size): (size, ()) for size in options.sizes}
    if options.device == "cpu":
        return plain
    return plain | {f"{size} direct": (size, DIRECT) for size in options.sizes if size > 1}


def show(name: str, values: dict[str, Any]) -> None:
    words = (f"{way}: {_figure(value)}" for way, value in values.items())
    print(f"{name:<28}" + "  ".join(f"{word:<22}" for word in words).rstrip(), flush=True)


def _figure(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"
    return str(value)


def check_small(options: argparse.Namespace, folder: Path) -> bool:
    """Whether a model in float32 gives the same tokens every way, and every engine ends as it should."""
    model = write_folder(folder / "tiny", read_shape("tiny"))
    first: list[list[int]] | None = None
    is_equal = True
    for way, (size, more) in ways(options).items():
        exact = ["--dtype", "float32", "--attention-backend", "sdpa"]  # the only one in float32
        flags = flags_for(model, size, options.device, SMALL, [*exact, *more])
        name = f"tiny, float32, ranks {way}"
        found = measure(name, flags, ("check",), SMALL, options.limit)
        tokens = found.get("check", {}).get("tokens")
        first = first or tokens
        if first and tokens:
            show("tiny, same tokens", {way: compare(tokens, first)})
        has_error = any("error" in figures for figures in found.values())
        is_equal = is_equal and not has_error and tokens is not None and tokens == first
    return is_equal


def measure_shape(options: argparse.Namespace, folder: Path) -> dict[str, Found]:
    sizes = SMALL if options.device == "cpu" else FULL
    model = write_folder(folder / options.shape, read_shape(options.shape))
    results: dict[str, Found] = {}
    for way, (size, more) in ways(options).items():
        flags = flags_for(model, size, options.device, sizes, [*options.flags, *more])
        name = f"{options.shape}, ranks {way}"
        found = results[way] = measure(name, flags, PARTS, sizes, options.limit)
        show(f"{options.shape}, ms a token", _of({way: found}, "batch1", "ms_per_token"))
    print(f"\n{options.shape}, by ranks:")
    show("start, s", _of(results, "build", "build_s"))
    show("batch 1, ms a token", _of(results, "batch1", "ms_per_token"))
    for length in sizes.first_token:
        show(f"TTFT of {length} tokens, ms", _of(results, "ttft", f"{length}_ms"))
    for batch in sizes.batches:
        show(f"batch {batch} decode, tok/s", _of(results, "decode", str(batch)))
    show("offline set, tok/s", _of(results, "offline", "tok_s"))
    tokens = {
        way: f["check"]["tokens"] for way, f in results.items() if "tokens" in f.get("check", {})
    }
    for first in list(tokens.values())[:1]:
        show("same tokens", {way: compare(others, first) for way, others in tokens.items()})
    return results


def _of(results: dict[str, Found], part: str, name: str) -> dict[str, Any]:
    found = {way: figures.get(part, {}).get(name, "-") for way, figures in results.items()}
    return {way: max(each) if isinstance(each, list) else each for way, each in found.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tensor_parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")],
                        default=[1, 2], help="numbers of ranks")  # fmt: skip
    parser.add_argument("--shape", choices=shape_names(), metavar="NAME",
                        help=f"of: {', '.join(shape_names())}")  # fmt: skip
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--check-only", action="store_true", help="compare tokens, measure nothing")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one engine")
    parser.add_argument("flags", nargs="*", help="after --: flags for the engine")
    options = parser.parse_args(argv)
    options.shape = options.shape or ("tiny" if options.device == "cpu" else "llama-8b")
    with tempfile.TemporaryDirectory() as folder:
        is_equal = check_small(options, Path(folder))
        results = {} if options.check_only else measure_shape(options, Path(folder))
    for found in results.values():
        found.get("check", {}).pop("tokens", None)
    line = {"bench": "tensor_parallel", "equal": is_equal, "ranks": results}
    line |= {"shape": options.shape, "flags": options.flags, "machine": describe_machine()}
    print(orjson.dumps(line).decode(), flush=True)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
