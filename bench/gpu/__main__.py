"""Measures this engine on a GPU with models of noise, beside its targets and two other engines.

    python -m bench.gpu                                   all of it
    python -m bench.gpu --models llama-8b --only check,batch1,offline
    python -m bench.gpu --device cpu --models tiny        the same on a CPU, in small, to try it out
    python -m bench.gpu ... -- --attention-backend triton flags for the engine

Every engine runs in a process of its own. A part that fails prints its error and the rest goes on; one
that takes too long is ended. Prints each part as it is done, a table for each model, and last of all
one line of JSON.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from bench.gpu.child import Job
from bench.gpu.engines import run_job
from bench.gpu.figures import compare, gap_figures
from bench.gpu.folder import read_shape, shape_names, write_folder
from bench.gpu.served import Served, serve_flags
from bench.gpu.sets import FULL, SMALL, Sizes, at_poisson_times, offline_set, online_mix
from bench.gpu.table import Results, headline, render_table
from bench.report import describe_machine
from srt.cli.options import cache_folder
from srt.config.experts import num_experts

INSIDE = ("check", "batch1", "ttft", "prefix", "decode", "offline", "online", "profile")
APART = ("eager", "deterministic", "graphs", "fp8", "start", "gateway")
ONE_SHAPE = {  # of this shape only, unless asked for
    "deterministic": "llama-8b",
    "graphs": "llama-8b",
    "fp8": "llama-8b",
    "online": "llama-8b",
    "prefix": "deepseek-v2-lite",
}
LONG = 32768  # a prompt whose first token is awaited too, where the shape is for such
GPU_ONLY = ("eager", "deterministic", "graphs", "fp8")
FP8 = ("--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3")
EVEN = ("--moe-force-even-routing",)  # the favourites of noise are no trained model's
EAGER = ("--cuda-graph-sizes", "0")
EAGER_PREFILL = ("--cuda-graph-prefill-tokens", "0")
FEW = ("--max-running", "8")
STEADY = ("--deterministic",)


class Session:
    """One model: which parts, where their figures go."""

    def __init__(
        self, options: argparse.Namespace, shape: str, folder: Path, deadline: float
    ) -> None:
        """`deadline`: on the monotonic clock, for all of it."""
        self.options, self.shape, self.deadline = options, shape, deadline
        self.config = read_shape(shape)
        self.sizes: Sizes = SMALL if options.small or options.device == "cpu" else FULL
        if self.shape == ONE_SHAPE["prefix"] and self.sizes is FULL:
            self.sizes = replace(FULL, first_token=(*FULL.first_token, LONG))
        self.results: Results = {}
        model = write_folder(folder / shape, self.config)
        self.flags = [
            *("--model", str(model), "--load-format", "dummy", "--device", options.device),
            *("--disable-radix-cache", "--max-running", str(self.sizes.max_running)),
            *("--log-level", "warning", "--seed", "1"),  # the same weights in every process
            *options.flags,
        ]
        if num_experts(self.config):
            self.flags += EVEN
            print(f"{shape}: tokens go to its experts in turn ({EVEN[0]})", flush=True)

    def wants(self, part: str) -> bool:
        if part in self.options.skip:
            return False
        if self.options.only:
            return part in self.options.only
        if self.options.device == "cpu":
            return part not in GPU_ONLY
        return ONE_SHAPE.get(part, self.shape) == self.shape

    def note(self, part: str, figures: dict[str, Any]) -> None:
        self.results[part] = figures
        shown = {name: value for name, value in figures.items() if name not in ("tokens", "all")}
        print(f"{self.shape} {part}: {orjson.dumps(_rounded(shown)).decode()}", flush=True)

    def attempt(self, part: str, work: Callable[[], dict[str, Any]]) -> None:
        try:
            self.note(part, work())
        except Exception as error:
            self.note(part, {"error": f"{type(error).__name__}: {error}"})

    def run(self) -> None:
        if self.wants("deterministic"):
            recorded, its = self._check(*STEADY), self._check(*STEADY, *EAGER)
            self.note("deterministic", _same(recorded, its))
        eager = self._check(*EAGER) if self.wants("eager") else None
        inside = [part for part in INSIDE if self.wants(part)]
        if inside:
            for part, figures in self._engine(["build", "warm", *inside]):
                self.note(part, figures)
                if part == "check" and eager is not None:
                    self.note("eager", _same(figures, eager))
        if self.wants("graphs"):
            self.attempt("graphs", self._graphs)
        if self.wants("fp8"):
            self.attempt("fp8", self._fp8)
        if self.wants("start") or self.wants("gateway"):
            self._served()

    def _time_left(self) -> float:
        """Seconds for the next engine."""
        limit: float = self.options.engine_limit
        return max(1.0, min(limit, self.deadline - time.monotonic()))

    def _engine(
        self, parts: list[str], *more: str, sizes: Sizes | None = None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """An engine in a process of its own: its parts as they are done."""
        job = Job(
            flags=[*self.flags, *more],
            cache_folder=cache_folder(),
            parts=parts,
            sizes=sizes or self.sizes,
            limit=self.options.limit,
        )
        return run_job(job, self._time_left())

    def _check(self, *flags: str) -> dict[str, Any]:
        """The check on an engine of its own."""
        found = dict(self._engine(["check"], *flags))
        return found.get("check", found.get("build", found.get("engine", {})))

    def _graphs(self) -> dict[str, Any]:
        """The first token of short prompts, whose prefill is recorded and replayed, and is not."""
        sizes = replace(self.sizes, first_token=self.sizes.short)
        ways = {"": FEW, "_eager": (*FEW, *EAGER_PREFILL)}
        found = {
            way: dict(self._engine(["build", "warm", "ttft"], *flags, sizes=sizes)).get("ttft", {})
            for way, flags in ways.items()
        }
        times = {
            f"{length}{way}_ms": ttft[f"{length}_ms"]
            for way, ttft in found.items()
            for length in sizes.short
        }
        shares = [times[f"{length}_ms"] / times[f"{length}_eager_ms"] for length in sizes.short]
        return {**times, "share": max(shares)}

    def _fp8(self) -> dict[str, Any]:
        found = dict(self._engine(["build", "warm", "offline"], *FP8))
        offline = found.get("offline", {})
        return offline if "tok_s" in offline else {"error": str(found)}

    def _served(self) -> None:
        """Starts it twice; the second one is asked over HTTP."""
        flags = serve_flags(self.flags)
        try:
            first = Served(flags, self._time_left())
            first.stop()
            second = Served(flags, self._time_left())
        except RuntimeError as error:
            self.note("start", {"error": str(error)})
            return
        try:
            self.note(
                "start",
                {
                    "first_s": first.ready_seconds,
                    "second_s": second.ready_seconds,
                    "phases_s": second.phases(),
                    "moments_s": second.moments,
                },
            )
            if self.wants("gateway"):
                self.attempt("gateway", lambda: self._gateway(second))
        finally:
            second.stop()

    def _gateway(self, served: Served) -> dict[str, Any]:
        """The offline set over HTTP, streamed; then, if wanted, the online load."""
        vocab, callers, limit = self.config["vocab_size"], self.options.callers, self.options.limit
        asks = offline_set(self.sizes, vocab)
        time.sleep(self.options.settle)  # for what a start leaves to quiet moments
        served.call(online_mix(self.sizes, vocab, self.sizes.max_running, 31), callers, limit)
        rates = []
        for _ in range(2):
            heard = served.call(asks, callers, limit)
            wall = max(one.end for one in heard) - min(one.sent for one in heard)
            rates.append(sum(one.tokens for one in heard) / wall)
        found: dict[str, Any] = {"tok_s": rates, "callers": callers}
        rate = self.results.get("online", {}).get("rate")
        if rate:
            count = max(8, round(rate * self.sizes.online_seconds))
            mix = at_poisson_times(online_mix(self.sizes, vocab, count, 32), rate, seed=33)
            heard = served.call(mix, callers, limit + self.sizes.online_seconds)
            found["online"] = gap_figures([gap for one in heard for gap in one.gaps])
        return found


def _same(recorded: dict[str, Any], eager: dict[str, Any]) -> dict[str, Any]:
    """Whether decode steps that are recorded and replayed give what others give: to the bit where no
    sum depends on the batch, else for the most part, since sizes are padded and keys are split."""
    if "tokens" in recorded and "tokens" in eager:
        return {"graph == eager": compare(recorded["tokens"], eager["tokens"])}
    return {"error": f"nothing to compare: {eager.get('error') or recorded.get('error')}"}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", type=_words, default=["qwen3-0.6b", "llama-8b", "qwen3-14b"],
                        help=f"shapes, of: {', '.join(shape_names())}")  # fmt: skip
    parser.add_argument("--only", type=_words, help=f"parts, of: {', '.join(INSIDE + APART)}")
    parser.add_argument("--skip", type=_words, default=[], help="parts that are left out")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="small sets, as on a CPU")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one run of a part")
    parser.add_argument("--engine-limit", type=float, default=240, help="seconds for one engine")
    parser.add_argument("--total-limit", type=float, default=560, help="seconds for all of it")
    parser.add_argument("--callers", type=int, default=8, help="processes that ask over HTTP")
    parser.add_argument("--settle", type=float, default=5, help="seconds between start and load")
    parser.add_argument("--out", type=Path, help="append the last line to this file")
    parser.add_argument("flags", nargs="*", help="after --: flags for the engine")
    options = parser.parse_args(argv)
    unknown = {*(options.only or ()), *options.skip} - {*INSIDE, *APART}
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    unknown = {*options.models} - {*shape_names()}
    if unknown:
        parser.error(
            f"there is no shape {', '.join(sorted(unknown))}; known: {', '.join(shape_names())}"
        )
    found: dict[str, Results] = {}
    began, deadline = time.perf_counter(), time.monotonic() + options.total_limit
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.models:
            session = Session(options, shape, Path(folder), deadline)
            found[shape] = session.results
            session.run()
            table = render_table(shape, session.results, session.sizes is not SMALL)
            print("\n" + table + "\n", flush=True)
    result = {
        "bench": "gpu",
        "seconds": round(time.perf_counter() - began, 1),
        "figures": {shape: headline(results) for shape, results in found.items()},
        "details": found,
        "flags": options.flags,
        "machine": describe_machine(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    line = orjson.dumps(_rounded(result))
    if options.out is not None:
        with options.out.open("ab") as file:
            file.write(line + b"\n")
    print(line.decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
