"""The worker: a target runner and its sampler, executing steps one after the other on one thread.

The single thread is the stream: steps run in launch order, and everything a step touches (page table,
last tokens, sampler, KV) is touched by this thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import torch

from srt.protocols.drafter import Guess, tree_depth
from srt.protocols.forward_batch import ForwardBatch, Slice, SliceResult, StepResult
from srt.protocols.worker import WorkerFacts
from srt.runner.inputs import StepInputs
from srt.runner.model_runner import ModelRunner
from srt.runner.scores import join_scores, score_slices
from srt.sampling.accept import Run, accept
from srt.sampling.sampler import Sampler

logger = logging.getLogger(__name__)


class StepTicket:
    """A launched step; see `srt.protocols.worker.Ticket`."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> StepResult:
        return self._future.result()


class TpModelWorker:
    """Owns the runner, the sampler and the thread, which it did not have to start itself: whoever
    builds the runner loads it on that same thread, so that one pool of compute threads exists."""

    def __init__(
        self, runner: ModelRunner, sampler: Sampler, facts: WorkerFacts, thread: ThreadPoolExecutor
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self._facts = facts
        self.thread = thread

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    def launch(self, batch: ForwardBatch) -> StepTicket:
        return self.submit(self.step, batch)

    def submit(self, work: Callable[[ForwardBatch], StepResult], batch: ForwardBatch) -> StepTicket:
        """Does `work` behind all earlier steps, on the worker's thread."""
        return StepTicket(self.thread.submit(work, batch))

    def close(self) -> None:
        self.thread.shutdown(wait=True)

    @torch.inference_mode()
    def step(self, batch: ForwardBatch) -> StepResult:
        """One step, now; on the worker's thread. Slices with guesses verify them."""
        began = perf_counter()
        self.sampler.open(batch.setups)
        inputs = self.runner.prepare(batch)
        prepared = perf_counter()
        hidden = self.runner.forward(inputs)
        num_sampling = sum(1 + piece.draft for piece in inputs.sampling)
        logits = self.runner.logits(hidden[:num_sampling]) if num_sampling else None
        forwarded = perf_counter()
        runs = [] if logits is None else self._sample(inputs.sampling, logits)
        self._close_ranks(batch.slices, inputs, runs)
        scores = score_slices(self.runner, self.sampler, inputs.scoring, hidden[num_sampling:])
        outcomes = [_outcome(*each) for each in zip(inputs.sampling, runs, strict=True)]
        results = join_scores(batch.slices, outcomes, scores)
        return StepResult(
            slices=results,
            prepare_seconds=prepared - began,
            forward_seconds=forwarded - prepared,
            sample_seconds=perf_counter() - forwarded,
        )

    def _sample(self, slices: list[Slice], logits: torch.Tensor) -> list[Run]:
        rows = [piece.row for piece in slices]
        allowed = [piece.allowed for piece in slices]
        masks = allowed if any(mask is not None for mask in allowed) else None
        if any(piece.draft for piece in slices):
            guesses = [
                Guess((piece.tokens or [])[piece.length - piece.draft :], piece.parents)
                for piece in slices
            ]
            looks = [piece.look_ahead for piece in slices]
            runs = accept(self.sampler, logits, rows, guesses, masks, looks)
            last = torch.tensor([run.last for run in runs], dtype=torch.int64, device=logits.device)
            self.runner.remember(rows, last)
            return runs
        sampled = self.sampler.sample(logits, rows, masks)
        self.runner.remember(rows, sampled.tokens)
        return [
            Run(tokens=[token], logprobs=[logprobs], error=error)
            for token, logprobs, error in zip(
                sampled.tokens.tolist(), sampled.logprobs, sampled.errors, strict=True
            )
        ]

    def _close_ranks(self, slices: list[Slice], inputs: StepInputs, runs: list[Run]) -> None:
        """K and V of the guesses that were right, out of a tree, move to where they belong: right behind
        the token before them."""
        if all(piece.parents is None for piece in slices):
            return
        sources: list[int] = []
        destinations: list[int] = []
        first, sampled = 0, iter(runs)
        for piece in slices:
            kept = next(sampled).kept if piece.sample else []
            behind = first + piece.length - piece.draft
            for place, index in enumerate(kept):
                if index != place:
                    sources.append(behind + index)
                    destinations.append(behind + place)
            first += piece.length
        if sources:
            slots = inputs.attention.slots
            self.runner.pool.move(slots[sources], slots[destinations])


def _outcome(piece: Slice, run: Run) -> SliceResult:
    result = SliceResult(
        tokens=[],
        num_drafted=piece.draft,
        num_deep=tree_depth(piece.parents) if piece.parents else piece.draft,
        kept=run.kept,
        error=run.error,
    )
    if run.error is None:
        result.tokens = run.tokens
        known = [each for each in run.logprobs if each is not None]
        result.logprobs = known or None
    return result
