"""Answers about requests: what each one is doing and why it waits. Plain data for the wire."""

from __future__ import annotations

from typing import Any

import msgspec.structs

from srt.scheduler.queue import Queue
from srt.scheduler.request import Request, Roster


def describe(request: Request, position: int | None, now: float) -> dict[str, Any]:
    """One request. `position` is how many wait ahead of it, None if it does not wait."""
    refusal = request.refusal
    entry: dict[str, Any] = {
        "uid": request.uid,
        "rid": request.work.rid,
        "index": request.work.index,
        "state": request.state.value,
        "tenant": request.tenant,
        "priority": request.work.priority,
        "age_seconds": now - request.arrived,
        "prompt_tokens": request.prompt_len,
        "computed_tokens": request.computed,
        "completion_tokens": request.output_len,
        "max_tokens": request.max_output,
        "cached_tokens": request.cached_tokens,
        "retractions": request.retractions,
        "position": position,
        "waits_for": None,
    }
    if refusal is not None:
        entry["waits_for"] = {
            "reason": refusal.reason.value,
            "needed": refusal.needed,
            "free": refusal.free,
            "evictable": refusal.evictable,
            "behind": refusal.behind,
        }
    return entry


def describe_all(roster: Roster, queue: Queue, now: float) -> dict[str, Any]:
    """Everybody alive: those that run in order of admission, then those that wait in their order."""
    running = [describe(request, None, now) for request in roster.active]
    waiting = [describe(request, index, now) for index, request in enumerate(queue)]
    return {"running": len(running), "waiting": len(waiting), "requests": running + waiting}


def describe_one(roster: Roster, queue: Queue, name: str, now: float) -> dict[str, Any] | None:
    """The samples whose rid, or uid, is `name`; None if there is none. With timing so far and the
    cache report: where the prefix match ended and why."""
    found = [r for r in roster.live.values() if r.work.rid == name or str(r.uid) == name]
    if not found:
        return None
    samples = []
    for request in found:
        entry = describe(request, queue.position(request), now)
        entry["timing"] = msgspec.structs.asdict(request.timing(now))
        entry["cache"] = None if request.cache is None else msgspec.structs.asdict(request.cache)
        samples.append(entry)
    return {"requests": samples}
