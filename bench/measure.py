"""A scenario against a server: which runs, in which order, with which state of the prefix cache."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from bench.drive import drive, warm_up
from bench.report import describe_engine, describe_machine, render, summarize
from bench.scenario import Scenario, workload_of
from bench.targets import Server
from bench.workloads import Workload, with_token_ids

WARM_SEED = 1_000_003  # apart from every seed that is measured
OPEN_LOOP_WARMTH = 8  # requests at once before a load that bounds none

Result = dict[str, Any]


async def measure(
    server: Server, scenario: Scenario, seed: int
) -> AsyncIterator[tuple[str, Result]]:
    """A table and a result for each run. Rounds over all loads, so that a machine that drifts drifts
    over all of them; each load is warmed up before its first run."""
    engine = describe_engine(await server.describe())
    for turn in range(scenario.repeat):
        for number, load in enumerate(scenario.loads):
            if turn == 0:
                other = await _prompts(server, scenario, load, seed + WARM_SEED + number)
                await warm_up(server, other, load.get("concurrency", OPEN_LOOP_WARMTH))
            drawn = seed + 1000 * turn + number
            workload = await _prompts(server, scenario, load, drawn)
            if scenario.cache != "as-is":
                await server.flush_cache()
            for state in ("cold", "warm") if scenario.cache == "pair" else (scenario.cache,):
                table, result = await _run(server, scenario, load, workload, drawn, state)
                yield table, {**result, "engine": engine}


async def _prompts(server: Server, scenario: Scenario, load: dict[str, Any], seed: int) -> Workload:
    workload = workload_of(scenario, load, seed)
    if not scenario.exact:
        return workload
    texts = {text for item in workload.items for text in (item.prefix, item.prompt) if text}
    return with_token_ids(workload, {text: await server.tokenize(text) for text in texts})


async def _run(
    server: Server,
    scenario: Scenario,
    load: dict[str, Any],
    workload: Workload,
    seed: int,
    state: str,
) -> tuple[str, Result]:
    records, wall = await drive(
        server,
        workload,
        concurrency=load.get("concurrency"),
        rate=load.get("rate"),
        seed=seed,
    )
    goals = scenario.goals
    summary = summarize(records, wall, goal_ttft=goals.get("ttft"), goal_tpot=goals.get("tpot"))
    label = ", ".join(f"{key} {value}" for key, value in load.items()) or "all at once"
    if state != "as-is":
        label += f", cache {state}"
    return render(f"{scenario.name}: {label}", summary), {
        "scenario": scenario.name,
        "workload": {"kind": workload.name, **workload.settings},
        "load": load,
        "exact": scenario.exact,
        "cache": state,
        "summary": summary,
        "machine": describe_machine(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
