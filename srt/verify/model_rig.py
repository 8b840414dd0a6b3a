"""The real model, built as `tandem serve` builds it, then given one KV pool after another."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from srt.cache.state_pool import StatePool
from srt.config.context import get_exec
from srt.config.rules_shape import CHAINS
from srt.protocols.worker import Worker, WorkerFacts
from srt.runner.build import ShowPhase, build_worker, make_pools
from srt.runner.decode_graphs import DecodeGraphs
from srt.runner.device_worker import DeviceWorker
from srt.runner.model_runner import ModelRunner
from srt.runner.prefill_graphs import PrefillCudaGraphRunner
from srt.runner.tp_worker import TpModelWorker
from srt.sampling.device_sampler import DeviceSampler
from srt.sampling.sampler import Sampler
from srt.spec.build import ALGORITHMS, speculate, speculate_on_device, stays_on_device
from srt.spec.worker import SpeculativeWorker
from srt.verify.rig import Rig

UNWRITTEN = 50.0  # what was never written must never be read: there it is wrong enough to be seen


def spoil(runner: ModelRunner) -> None:
    """Fills the KV pool behind its padding page with what no model writes."""
    for layer in range(runner.arch.num_layers):
        runner.pool.keys(layer)[runner.pool.page_size :].fill_(UNWRITTEN)
        runner.pool.values(layer)[runner.pool.page_size :].fill_(UNWRITTEN)
        if isinstance(runner.pool, StatePool):
            memory = runner.pool.memory(layer)
            memory[len(memory) // runner.pool.num_pages :].fill_(UNWRITTEN)


def open_rig(cache_folder: str, show: ShowPhase) -> Rig:
    """Builds what the published configuration asks for; it is sealed afterwards."""
    made: list[Rig] = []

    def keep(target: TpModelWorker, drafts: list[ModelRunner]) -> Worker:
        made.append(ModelRig(target, drafts))
        return speculate(target, drafts)

    def keep_device(plain: DeviceWorker, drafts: list[ModelRunner]) -> Worker:
        made.append(DeviceRig(plain, drafts))
        return speculate_on_device(plain, drafts)

    worker = build_worker(
        cache_folder, show, keep, on_device=keep_device if stays_on_device() else None
    )
    if isinstance(worker, DeviceWorker):
        return DeviceRig(worker, [])
    [rig] = made
    return rig


def is_exact(runner: ModelRunner) -> bool:
    pair = runner.attention_pair
    is_native = {runner.ops.implementation, pair.prefill, pair.decode} == {"native"}
    return is_native or runner.deterministic


def words_of(runner: ModelRunner) -> str:
    pair, linears = runner.attention_pair, runner.quantization or "unquantized"
    return (
        f"{runner.ops.implementation}, {runner.spec.dtype}, {linears}, attention {pair.prefill} "
        f"(prefill) and {pair.decode} (decode)"
    )


def renew(runners: list[ModelRunner], facts: WorkerFacts) -> None:
    """Pools of another size, spoilt, for the target and its drafts."""
    runners[0].capture(())
    make_pools(
        runners, num_pages=facts.num_pages, page_size=facts.page_size, max_rows=facts.max_rows
    )
    for each in runners:
        spoil(each)
        each.init_backends()


class ModelRig:
    """A `Rig` of runners that compute on a thread."""

    def __init__(self, target: TpModelWorker, drafts: list[ModelRunner]) -> None:
        self.target = target
        self._runners = [target.runner, *drafts]

    @property
    def kernels(self) -> str:
        runner = self.target.runner
        if runner.device.type == "cuda":
            return words_of(runner)
        return f"{words_of(runner)}, {get_exec().num_threads} threads"

    @property
    def is_exact(self) -> bool:
        return is_exact(self.target.runner)

    def worker(
        self, *, num_tokens: int, page_size: int, max_rows: int, algorithm: str | None
    ) -> Worker:
        return self.target.thread.submit(
            self._worker, num_tokens, page_size, max_rows, algorithm
        ).result()

    def _worker(
        self, num_tokens: int, page_size: int, max_rows: int, algorithm: str | None
    ) -> Worker:
        target, runner = self.target, self.target.runner
        facts = replace(
            target.facts,
            num_pages=1 + num_tokens // page_size,
            page_size=page_size,
            max_rows=max_rows,
        )
        renew(self._runners, facts)
        sampler = Sampler(max_rows, facts.vocab_size, runner.device, runner.ops.best_token)
        worker = TpModelWorker(runner, sampler, facts, target.thread)
        if algorithm is None:
            return worker
        return SpeculativeWorker(worker, ALGORITHMS[algorithm](worker, self._runners[1:]))

    def close(self) -> None:
        self.target.close()


class DeviceRig:
    """A `Rig` of runners that work on behind the host's back, recorded steps included."""

    def __init__(self, plain: DeviceWorker, drafts: list[ModelRunner]) -> None:
        """Holds nothing that `plain` recorded: it makes room for the engines to come."""
        self._facts, self._timeline, self._staging = plain.facts, plain.timeline, plain.staging
        self._runners = [plain.runner, *drafts]
        self._thread: ThreadPoolExecutor | None = None  # of an engine whose guesses are the host's

    @property
    def kernels(self) -> str:
        runner = self._runners[0]
        sizes = len(runner.spec.graph_sizes) + len(runner.spec.prefill_graph_sizes)
        return f"{words_of(runner)}, {sizes} CUDA graphs" if sizes else words_of(runner)

    @property
    def is_exact(self) -> bool:
        return is_exact(self._runners[0])

    @torch.inference_mode()
    def worker(
        self, *, num_tokens: int, page_size: int, max_rows: int, algorithm: str | None
    ) -> Worker:
        self._end_engine()
        runner, timeline, staging = self._runners[0], self._timeline, self._staging
        facts = replace(
            self._facts,
            num_pages=1 + num_tokens // page_size,
            page_size=page_size,
            max_rows=max_rows,
        )
        renew(self._runners, facts)
        sizes = tuple(size for size in runner.spec.graph_sizes if size <= max_rows)
        plain = DeviceWorker(
            runner,
            DeviceSampler(max_rows, facts.vocab_size, runner.device),
            facts,
            timeline,
            DecodeGraphs(runner, timeline, staging, sizes),
            PrefillCudaGraphRunner(runner, timeline, runner.spec.prefill_graph_sizes),
            staging,
        )
        if algorithm is None:
            return plain
        if algorithm in CHAINS and self._runners[1:]:
            return speculate_on_device(plain, self._runners[1:])
        return self._ask_host(facts, algorithm)

    def _end_engine(self) -> None:
        """The one before this: its steps, a broken one's too, its graphs, and what it held of the
        device's memory, which nobody can free while something is recorded."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._timeline.forget()
        gc.collect()  # a scheduler and its outbox know each other
        torch.cuda.empty_cache()

    def _ask_host(self, facts: WorkerFacts, algorithm: str) -> Worker:
        """Guesses that the host makes or chooses; steps are not recorded then."""
        runner = self._runners[0]
        thread = self._thread = ThreadPoolExecutor(1, "model", initializer=self._timeline.join)
        sampler = Sampler(facts.max_rows, facts.vocab_size, runner.device, runner.ops.best_token)
        worker = TpModelWorker(runner, sampler, facts, thread)
        return SpeculativeWorker(worker, ALGORITHMS[algorithm](worker, self._runners[1:]))

    def close(self) -> None:
        self._end_engine()
