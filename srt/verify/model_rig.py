"""The real model, built as `tandem serve` builds it, then given one KV pool after another."""

from __future__ import annotations

from dataclasses import replace

from srt.config.context import get_exec
from srt.protocols.worker import Worker
from srt.runner.build import ShowPhase, build_worker
from srt.runner.model_runner import ModelRunner
from srt.runner.tp_worker import TpModelWorker
from srt.sampling.sampler import Sampler
from srt.spec.build import ALGORITHMS, speculate
from srt.spec.worker import SpeculativeWorker

UNWRITTEN = 50.0  # what was never written must never be read: there it is wrong enough to be seen


def spoil(runner: ModelRunner) -> None:
    """Fills the KV pool behind its padding page with what no model writes."""
    for layer in range(runner.arch.num_layers):
        runner.pool.keys(layer)[runner.pool.page_size :].fill_(UNWRITTEN)
        runner.pool.values(layer)[runner.pool.page_size :].fill_(UNWRITTEN)


class ModelRig:
    """A `Rig`. The configuration is published before; it is sealed afterwards."""

    def __init__(self, cache_folder: str, show: ShowPhase) -> None:
        self._runners: list[ModelRunner] = []
        self._target: TpModelWorker | None = None

        def keep(target: TpModelWorker, drafts: list[ModelRunner]) -> Worker:
            self._target = target
            self._runners = [target.runner, *drafts]
            return speculate(target, drafts)

        build_worker(cache_folder, show, keep)

    @property
    def target(self) -> TpModelWorker:
        assert self._target is not None, "build_worker hands it over"
        return self._target

    @property
    def kernels(self) -> str:
        runner = self.target.runner
        pair, linears = runner.attention_pair, runner.quantization or "unquantized"
        return (
            f"{runner.ops.implementation}, {runner.spec.dtype}, {linears}, attention {pair.prefill} "
            f"(prefill) and {pair.decode} (decode), {get_exec().num_threads} threads"
        )

    @property
    def is_exact(self) -> bool:
        runner = self.target.runner
        pair = runner.attention_pair
        return {runner.ops.implementation, pair.prefill, pair.decode} == {"native"}

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
        runner.capture(())
        for each in self._runners:
            each.allocate(
                num_pages=facts.num_pages,
                page_size=page_size,
                max_rows=max_rows,
                table=None if each is runner else runner.table,
            )
            spoil(each)
            each.init_backends()
        sampler = Sampler(max_rows, facts.vocab_size, runner.device, runner.ops.best_token)
        worker = TpModelWorker(runner, sampler, facts, target.thread)
        if algorithm is None:
            return worker
        return SpeculativeWorker(worker, ALGORITHMS[algorithm](worker, self._runners[1:]))

    def close(self) -> None:
        self.target.close()
