"""The command. Prints a table and one JSON line; exit code 1 if anything was wrong."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import orjson

from bench.soak.books import audit_all_along, check_memory, close_books, read_memory, total
from bench.soak.callers import LIMIT, HttpCaller, ZmqCaller
from bench.soak.judge import Outcome, classify, judge
from bench.soak.plan import LONGEST, Errand, Library, draw_errands, draw_settings
from bench.soak.site import Site, own_engine, running_engine
from srt.client import AsyncClient
from srt.errors import ConfigError

SHOWN = 20  # faults that are printed
BUSY_SECONDS = 0.05  # before a request that found the queue full comes again


def read_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=48, help="requests open at once")
    parser.add_argument("--inline", action="store_true", help="our own engine in one process")
    parser.add_argument("--zmq", help="the front of a running engine; needed to audit it")
    parser.add_argument("--url", help="its HTTP address; default: ask over ZMQ only")
    parser.add_argument("--pid", type=int, help="its first process, to watch its memory")
    parser.add_argument("--max-tokens", type=int, default=LONGEST, help="the most one may ask for")
    parser.add_argument(
        "--cut-seconds", type=float, default=0.05, help="when a caller goes away, on average"
    )
    options = parser.parse_args(arguments)
    if options.url and not options.zmq:
        raise ConfigError("--url needs --zmq too: the books are read over ZMQ")
    return options


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Runs it and returns the report; `faults` is empty if all is well."""
    library = Library(options.seed)
    settings: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        if options.zmq:
            site = running_engine(options.url, options.zmq, options.pid)
        else:
            settings = draw_settings(options.seed)
            site = await stack.enter_async_context(
                own_engine(library, settings, inline=options.inline)
            )
        assert site.connect is not None
        clients = [await stack.enter_async_context(await site.connect()) for _ in range(5)]
        texts = None if options.zmq else library
        return {**await run(options, site, clients, library, texts), "settings": settings}


async def run(
    options: argparse.Namespace,
    site: Site,
    clients: list[AsyncClient],
    library: Library,
    texts: Library | None,
) -> dict[str, Any]:
    """`library` has the prompts, `texts` knows their outputs; None if the model is a real one."""
    watcher, *askers = clients
    assert site.connect is not None
    callers: dict[str, HttpCaller | ZmqCaller] = {"zmq": ZmqCaller(askers, site.connect)}
    if site.url is not None:
        callers["http"] = HttpCaller(site.url)
    errands = draw_errands(
        options.requests,
        options.seed,
        library,
        ways=tuple(sorted(callers)),
        max_tokens=options.max_tokens,
        cut=options.cut_seconds,
    )
    before = await watcher.metrics()
    violations: set[str] = set()
    auditing = asyncio.create_task(audit_all_along(watcher, violations))
    counts: Counter[str] = Counter()
    faults: list[str] = []
    middle: dict[str, int] = {}
    num_samples = {"ended": 0, "cut": 0}
    waiting = list(reversed(errands))
    num_busy = 0

    def note(errand: Errand, outcome: Outcome) -> None:
        counts[classify(errand, outcome)] += 1
        faults.extend(judge(errand, outcome, texts))
        if errand.is_bad or outcome.error == "queue_full":
            return
        all_ended = len(outcome.ends) == errand.n
        num_samples["ended" if all_ended else "cut"] += errand.n

    async def ask(errand: Errand) -> Outcome:
        """Again while the queue is full, so that every request is judged in the end."""
        nonlocal num_busy
        patience = time.monotonic() + LIMIT
        while True:
            outcome = await callers[errand.way].run(errand)
            if outcome.error != "queue_full" or time.monotonic() > patience:
                return outcome
            num_busy += 1
            num_samples["cut"] += errand.n  # of some samples all but one may have got a place
            errand = replace(errand, tries=errand.tries + 1)
            await asyncio.sleep(BUSY_SECONDS)

    async def keep_one_open() -> None:
        while waiting:
            errand = waiting.pop()
            note(errand, await ask(errand))
            if not middle and len(waiting) < len(errands) / 2:
                middle.update(read_memory(site.pids))

    started = time.perf_counter()
    await asyncio.gather(*(keep_one_open() for _ in range(options.concurrency)))
    seconds = time.perf_counter() - started
    end = read_memory(site.pids)
    if auditing.done():
        faults.append(f"the audits stopped: {auditing.exception()!r}")
    auditing.cancel()
    faults += sorted(violations)
    faults += await close_books(watcher, before, num_samples["ended"], num_samples["cut"])
    faults += check_memory(middle, end)
    after = await watcher.metrics()
    return {
        "requests": len(errands),
        "seed": options.seed,
        "seconds": round(seconds, 2),
        "request_per_s": round(len(errands) / seconds, 1),
        "outcomes": dict(counts),
        "busy": num_busy,
        "samples": num_samples,
        "generated_tokens": total(after, "generation_tokens_total"),
        "retractions": total(after, "retractions_total"),
        "cache_hit_tokens": total(after, "prefix_tokens_hit_total"),
        "memory_mb": {
            role: [round(size / 1e6, 1) for size in (middle.get(role, 0), end[role])]
            for role in end
        },
        "faults": faults[:SHOWN],
        "num_faults": len(faults),
    }


def render(report: dict[str, Any]) -> str:
    rows = [
        ("requests", f"{report['requests']} in {report['seconds']} s, seed {report['seed']}"),
        ("outcomes", ", ".join(f"{n} {word}" for word, n in sorted(report["outcomes"].items()))),
        ("busy", f"{report['busy']} times the queue was full, and the request came again"),
        ("tokens", f"{report['generated_tokens']:.0f} generated"),
        ("retractions", f"{report['retractions']:.0f}"),
        ("cache hits", f"{report['cache_hit_tokens']:.0f} prompt tokens"),
    ]
    if report["settings"]:
        rows.append(("engine", ", ".join(f"{k} {v}" for k, v in report["settings"].items())))
    for role, (middle, end) in report["memory_mb"].items():
        rows.append((role, f"{middle} MB in the middle, {end} MB at the end"))
    rows.append(("faults", str(report["num_faults"] or "none")))
    rows += [("", fault) for fault in report["faults"]]
    return "\n".join(f"  {name:<12} {text}" for name, text in rows)


def main() -> int:
    report = asyncio.run(soak(read_options(sys.argv[1:])))
    print(render(report))
    print(orjson.dumps({"soak": report}).decode())
    return 1 if report["num_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
