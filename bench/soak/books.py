"""The books at the end: nothing live, every page back, counters that add up, memory that stays."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from srt.client import AsyncClient

SECONDS_TO_REST = 30.0
ROOM = 16e6  # bytes a process may grow between the middle and the end, beside 10 %


def read_memory(pids: dict[str, int]) -> dict[str, int]:
    """Resident bytes of each; none where there is no /proc."""
    found = {}
    for role, pid in pids.items():
        path = Path(f"/proc/{pid}/statm")
        if path.exists():
            found[role] = int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found


def check_memory(middle: dict[str, int], end: dict[str, int]) -> list[str]:
    return [
        f"{role} grew from {middle[role] / 1e6:.1f} to {size / 1e6:.1f} MB in the second half"
        for role, size in end.items()
        if role in middle and size > middle[role] * 1.1 + ROOM
    ]


async def audit_all_along(client: AsyncClient, found: set[str]) -> None:
    """While the requests run; until cancelled."""
    while True:
        found.update((await client.audit())["violations"])
        await asyncio.sleep(0.1)


def total(metrics: dict[str, Any], name: str, *values: str) -> float:
    """The sum of a metric's samples; of those with such a label only, if one is given."""
    samples = metrics[f"tandem_{name}"]["samples"]
    return float(
        sum(value for labels, value in samples if not values or set(values) & {*labels.values()})
    )


async def close_books(
    client: AsyncClient, before: dict[str, Any], ended: int, cut: int
) -> list[str]:
    """What does not balance. `ended`: samples that came to an end of their own since `before`; `cut`:
    those that may have been cut off, some before the engine knew them."""
    found: list[str] = []
    deadline = asyncio.get_running_loop().time() + SECONDS_TO_REST
    while True:
        live, held = (await client.health())["live"], await client.requests()
        if live == held["running"] == held["waiting"] == 0:
            break
        if asyncio.get_running_loop().time() > deadline:
            found.append(f"still live: {live}, {held}")
            break
        await asyncio.sleep(0.05)
    found += (await client.audit())["violations"]
    metrics = await client.metrics()
    for name, entry in metrics.items():
        for labels, value in entry["samples"] if entry["type"] != "histogram" else ():
            if value < 0:
                found.append(f"{name} {labels} is {value}")
    for name in ("requests_running", "requests_waiting", "waiting_tokens", "kv_tokens_used"):
        if total(metrics, name):
            found.append(f"{name} is {total(metrics, name)} at rest")
    if total(metrics, "audit_failures_total"):
        found.append(f"{total(metrics, 'audit_failures_total')} violations were audited")
    finished = total(metrics, "requests_finished_total") - total(before, "requests_finished_total")
    if not ended <= finished <= ended + cut:
        found.append(f"{finished} samples finished; callers saw {ended} end and cut {cut}")
    errors = [total(m, "requests_finished_total", "error") for m in (before, metrics)]
    if errors[0] != errors[1]:
        found.append(f"{errors[1] - errors[0]} samples ended in errors")
    free, evictable = total(metrics, "kv_tokens_free"), total(metrics, "kv_tokens_evictable")
    whole = sum(total(before, f"kv_tokens_{part}") for part in ("free", "evictable", "used"))
    if free + evictable != whole:
        found.append(f"of {whole} KV tokens {free} are free and {evictable} evictable")
    return found
