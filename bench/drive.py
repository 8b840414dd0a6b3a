"""When it is asked: closed loop, Poisson arrivals, or a trace's own times."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from dataclasses import replace

from bench.record import Record
from bench.targets import Target, Turns
from bench.workloads import Item, Workload

WARM_TOKENS = 16


async def drive(
    target: Target,
    workload: Workload,
    *,
    concurrency: int | None = None,
    rate: float | None = None,
    seed: int = 0,
) -> tuple[list[Record], float]:
    """Runs the workload and returns the records and the wall time in seconds.

    `concurrency` n keeps n requests (or sessions) open; `rate` r sends r a second with exponential gaps,
    scaled so that the last one leaves at count / r; neither: a trace's own times, or all at once.
    """
    start = time.perf_counter()
    sessions = _group(workload.items)
    if concurrency is not None:
        records = await _closed_loop(target, sessions, concurrency, start)
    else:
        times = _arrival_times([session[0] for session in sessions], rate, seed)
        tasks = [
            asyncio.create_task(_run_session(target, session, due, start))
            for session, due in zip(sessions, times, strict=True)
        ]
        records = [record for done in await asyncio.gather(*tasks) for record in done]
    return records, time.perf_counter() - start


def _group(items: list[Item]) -> list[list[Item]]:
    """Items of one session together, in order; the others alone."""
    sessions: dict[object, list[Item]] = defaultdict(list)
    for number, item in enumerate(items):
        key = ("alone", number) if item.session is None else ("session", item.session)
        sessions[key].append(item)
    return list(sessions.values())


def _arrival_times(items: list[Item], rate: float | None, seed: int) -> list[float]:
    if rate is None:
        return [item.at or 0.0 for item in items]
    draw = random.Random(seed)
    moments, now = [], 0.0
    for _ in items:
        now += draw.expovariate(rate)
        moments.append(now)
    scale = (len(items) / rate) / now
    return [moment * scale for moment in moments]


async def _closed_loop(
    target: Target, sessions: list[list[Item]], concurrency: int, start: float
) -> list[Record]:
    waiting = list(reversed(sessions))
    records: list[Record] = []

    async def keep_one_open() -> None:
        while waiting:
            session = waiting.pop()
            records.extend(await _run_session(target, session, None, start))

    await asyncio.gather(*(keep_one_open() for _ in range(concurrency)))
    return records


async def _run_session(
    target: Target, session: list[Item], due: float | None, start: float
) -> list[Record]:
    """`due` None: now. Later turns are due when the one before them ended."""
    history: Turns = []
    records = []
    for item in session:
        now = time.perf_counter() - start
        if due is not None and due > now:
            await asyncio.sleep(due - now)
        record = Record(due=now if due is None else due)
        await target.ask(item, history, record, start)
        records.append(record)
        if record.error is not None:
            break
        history = [*history, ("user", item.prefix + item.prompt), ("assistant", record.text)]
        due = None
    return records


async def warm_up(target: Target, workload: Workload, concurrency: int) -> None:
    """As many at once as will be measured, so that every batch size up to it has been seen. Answers are
    short; the prompts should be other ones than the measured."""
    items = [
        replace(item, max_tokens=min(item.max_tokens, WARM_TOKENS))
        for item in workload.items[:concurrency]
    ]
    await drive(target, replace(workload, items=items), concurrency=concurrency)
