"""Puts a scheduler together from a worker and settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from srt.cache.no_cache import NoCache
from srt.cache.radix import RadixCache
from srt.cache.store import KVStore
from srt.protocols.grammar import Grammars
from srt.protocols.prefix_cache import PrefixCache
from srt.protocols.worker import Worker, WorkerFacts
from srt.scheduler.budget import Settings
from srt.scheduler.journal import Recorder
from srt.scheduler.loop import Scheduler
from srt.wire.channels import Sender


def build_store(facts: WorkerFacts, settings: Settings) -> KVStore:
    """The KV memory of `facts`, with the prefix cache that the settings ask for."""
    cache: PrefixCache = NoCache()
    if settings.radix_cache:
        cache = RadixCache(facts.page_size, "lfu" if settings.eviction_policy == "lfu" else "lru")
    return KVStore(
        num_pages=facts.num_pages,
        page_size=facts.page_size,
        max_rows=facts.max_rows,
        cache=cache,
    )


def build_scheduler(
    worker: Worker,
    settings: Settings,
    outbox: Sender,
    clock: Callable[[], float],
    config: Callable[[], dict[str, Any]] = dict,
    journal: Path | None = None,
    grammars: Grammars | None = None,
) -> Scheduler:
    """`config` answers the topic "config". `journal`: record everything for a replay there; then
    `Scheduler.close` ends the file. `grammars` None: requests with a grammar are refused."""
    recorder = None
    if journal is not None:
        recorder = Recorder(journal, worker, settings, clock)
        grammars = None if grammars is None else recorder.record_grammars(grammars)
    return Scheduler(
        worker=worker if recorder is None else recorder,
        store=build_store(worker.facts, settings),
        outbox=outbox,
        settings=settings,
        clock=clock if recorder is None else recorder.clock,
        config=config,
        recorder=recorder,
        grammars=grammars,
    )
