"""`tandem bench`: run scenarios against a server, compare results, look at the engine's own share."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from bench.compare import compare
from bench.measure import measure
from bench.plot import plot
from bench.profile import render_profile
from bench.scenario import CACHES, Scenario, read_scenario
from bench.targets import HttpTarget, Server, ZmqTarget
from srt.client import AsyncClient
from srt.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("whom to ask (one of them)")
    where.add_argument("--url", help="an OpenAI-compatible server, e.g. http://127.0.0.1:8000")
    where.add_argument("--zmq", help="an engine's ZMQ front, e.g. tcp://127.0.0.1:5555")
    where.add_argument("--keys", type=Path, help="our key file, if that front wants one")
    where.add_argument("--model", default="smollm2-135m", help="model name in HTTP requests")
    where.add_argument("--api-key", help="key for HTTP requests")
    what = parser.add_argument_group("what to ask")
    what.add_argument("--scenario", type=Path, help="a file like bench/scenarios/cpu-http.toml")
    what.add_argument("--kind", default="random", help="random, shared-prefix, multi-turn, trace")
    what.add_argument("--trace", type=Path, help="the trace file of --kind trace")
    what.add_argument("--count", type=int, default=32, help="requests (random)")
    what.add_argument("--words", type=int, default=60, help="length of a prompt")
    what.add_argument("--max-tokens", type=int, default=64, help="tokens to generate")
    what.add_argument("--spread", type=float, default=0.0, help="0.2: lengths from 80 to 120 %%")
    what.add_argument(
        "--exact", action="store_true", help="send token ids, exactly as many as --words says"
    )
    what.add_argument("--temperature", type=float, default=0.0)
    what.add_argument("--seed", type=int, help="default: drawn, so that no prompt is cached")
    load = parser.add_argument_group("how hard")
    load.add_argument("--concurrency", type=int, nargs="*", help="closed loop, one run each")
    load.add_argument(
        "--rate", type=float, nargs="*", help="Poisson arrivals a second, one run each"
    )
    load.add_argument("--repeat", type=int, default=None, help="rounds over all loads, in turn")
    load.add_argument(
        "--cache",
        choices=CACHES,
        help="empty the prefix cache before each run (cold), and then ask the same again (pair)",
    )
    load.add_argument("--goal-ttft", type=float, help="seconds, for goodput")
    load.add_argument("--goal-tpot", type=float, help="seconds, for goodput")
    result = parser.add_argument_group("what to do with it")
    result.add_argument("--out", type=Path, help="append one JSON line per run to this file")
    result.add_argument("--plot", type=Path, help="write a PNG of latency against load")
    result.add_argument(
        "--profile-step", action="store_true", help="where a step's time went (--zmq)"
    )
    result.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("BEFORE", "AFTER"),
        help="compare two result files",
    )


def run(options: argparse.Namespace) -> int:
    if options.compare:
        print(compare_files(*options.compare))
        return 0
    if bool(options.url) == bool(options.zmq):
        raise ConfigError("give one of --url and --zmq (`tandem serve` prints both)")
    if options.profile_step and not options.zmq:
        raise ConfigError("--profile-step asks the engine itself: give --zmq instead of --url")
    if options.seed is None:
        options.seed = secrets.randbelow(1_000_000)
    scenario = change(scenario_of(options), options)
    results = asyncio.run(run_loads(options, scenario))
    if options.out:
        with options.out.open("ab") as file:
            file.writelines(orjson.dumps(result) + b"\n" for result in results)
    if options.plot:
        plot(results, options.plot)
    return 1 if any(result["summary"]["failed"] for result in results) else 0


def scenario_of(options: argparse.Namespace) -> Scenario:
    """The file's scenario, or one made of the flags."""
    if options.scenario:
        return read_scenario(options.scenario)
    workload: dict[str, Any] = {"kind": options.kind}
    if options.kind == "random":
        workload |= {"words": options.words, "max_tokens": options.max_tokens}
        workload |= {"count": options.count, "spread": options.spread}
    elif options.kind == "shared-prefix":
        workload |= {"groups": 4, "per_group": max(1, options.count // 4), "prefix_words": 1000}
        workload |= {"words": options.words, "max_tokens": options.max_tokens}
    elif options.kind == "multi-turn":
        workload |= {"sessions": max(1, options.count // 4), "turns": 4}
        workload |= {"words": options.words, "max_tokens": options.max_tokens}
    elif options.kind == "trace":
        if options.trace is None:
            raise ConfigError("--kind trace needs --trace FILE")
        workload |= {"path": str(options.trace), "limit": options.count}
    loads: list[dict[str, Any]] = [{"concurrency": n} for n in options.concurrency or ()]
    loads += [{"rate": rate} for rate in options.rate or ()]
    goals = {"ttft": options.goal_ttft, "tpot": options.goal_tpot}
    return Scenario(
        name=options.kind,
        workload=workload,
        loads=loads or ([{}] if options.kind == "trace" else [{"concurrency": 1}]),
        goals={name: value for name, value in goals.items() if value is not None},
        temperature=options.temperature,
    )


def change(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    """What flags may change of a file's scenario."""
    return replace(
        scenario,
        repeat=options.repeat or scenario.repeat,
        exact=options.exact or scenario.exact,
        cache=options.cache or scenario.cache,
    )


async def run_loads(options: argparse.Namespace, scenario: Scenario) -> list[dict[str, Any]]:
    """Prints each result as a table, then as one JSON line unless all of it failed."""
    results = []
    async with server_of(options, scenario) as (server, client):
        async for table, result in measure(server, scenario, options.seed):
            print(table)
            if result["summary"]["failed"] < result["summary"]["requests"]:
                print(orjson.dumps(result).decode(), flush=True)
            results.append(result)
        if options.profile_step and client is not None:
            print(render_profile(await client.ask("profile")))
    return results


@asynccontextmanager
async def server_of(
    options: argparse.Namespace, scenario: Scenario
) -> AsyncIterator[tuple[Server, AsyncClient | None]]:
    """Whom the flags name, with its client if it is asked over ZMQ."""
    if options.zmq:
        async with await AsyncClient.connect(options.zmq, keys=options.keys) as client:
            yield ZmqTarget(client, temperature=scenario.temperature), client
        return
    target = HttpTarget(
        options.url,
        model=options.model,
        temperature=scenario.temperature,
        api_key=options.api_key,
    )
    yield target, None


def compare_files(before: Path, after: Path) -> str:
    """The last result of each load in both files."""

    def read(path: Path) -> dict[str, dict[str, Any]]:
        rows = [orjson.loads(line) for line in path.read_bytes().splitlines() if line]
        return {
            orjson.dumps([row["scenario"], row["load"], row.get("cache")]).decode(): row
            for row in rows
        }

    old, new = read(before), read(after)
    common = [key for key in old if key in new]
    if not common:
        raise ConfigError(f"{before} and {after} have no load in common")
    return "\n\n".join(
        f"{key}\n{compare(old[key]['summary'], new[key]['summary'])}" for key in common
    )
