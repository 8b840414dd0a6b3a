"""The worker of a GPU, ready as soon as it can serve: a decode graph for one row and one for all of them
are recorded, the others when nobody waits, or when a step wants them."""

from __future__ import annotations

from collections.abc import Callable

from srt.protocols.worker import WorkerFacts
from srt.runner.decode_graphs import DecodeGraphs
from srt.runner.device_worker import DeviceWorker
from srt.runner.model_runner import ModelRunner
from srt.runner.staging import Staging
from srt.runner.timeline import Timeline
from srt.runner.warm_up import warm_up
from srt.sampling.device_sampler import DeviceSampler


def build_device_worker(
    runner: ModelRunner,
    facts: WorkerFacts,
    timeline: Timeline,
    show: Callable[[str, float | None], None],
) -> DeviceWorker:
    """`runner` has its pool and backends. Everything runs on `timeline`, made in this thread."""
    staging = Staging(runner.device)
    sampler = DeviceSampler(facts.max_rows, facts.vocab_size, runner.device)
    graphs = DecodeGraphs(runner, timeline, staging, runner.spec.graph_sizes)
    worker = DeviceWorker(runner, sampler, facts, timeline, graphs, staging)
    warm_up(worker, show=lambda done: show("warm-up", done))
    worker.record(least=True, show=lambda done: show("graphs", done))
    return worker
