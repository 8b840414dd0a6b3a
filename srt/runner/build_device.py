"""The worker of a GPU, ready as soon as it can serve: a decode graph for one row and one for all of them
are recorded, the others when nobody waits, or when a step wants them."""

from __future__ import annotations

from collections.abc import Callable

from srt.config.context import get_schedule
from srt.protocols.worker import Worker, WorkerFacts
from srt.runner.decode_graphs import DecodeGraphs
from srt.runner.device_worker import DeviceWorker
from srt.runner.model_runner import ModelRunner
from srt.runner.prefill_graphs import PrefillCudaGraphRunner
from srt.runner.staging import Staging
from srt.runner.timeline import Timeline
from srt.runner.warm_up import warm_up
from srt.sampling.device_sampler import DeviceSampler

SpeculateOnDevice = Callable[[DeviceWorker, list[ModelRunner]], Worker]


def build_device_worker(
    runners: list[ModelRunner],
    facts: WorkerFacts,
    timeline: Timeline,
    show: Callable[[str, float | None], None],
    speculate: SpeculateOnDevice | None = None,
) -> Worker:
    """The target comes first, then drafts; all have their pools and backends. Everything runs on
    `timeline`, made in this thread."""
    runner = runners[0]
    staging = Staging(runner.device)
    sampler = DeviceSampler(facts.max_rows, facts.vocab_size, runner.device)
    sizes = runner.spec.graph_sizes
    decodes = DecodeGraphs(runner, timeline, staging, sizes)
    prefills = PrefillCudaGraphRunner(runner, timeline, runner.spec.prefill_graph_sizes)
    plain = DeviceWorker(runner, sampler, facts, timeline, decodes, prefills, staging)
    worker: Worker = plain if speculate is None else speculate(plain, runners[1:])
    warm_up(
        worker,
        guesses=speculate is not None,
        longest=get_schedule().max_step_tokens,
        show=lambda done: show("warm-up", done),
    )
    plain.record_least(lambda done: show("graphs", done))
    return worker
