"""The worker of a device that works on behind the host's back: a step is launched and its results are
fetched later, so the device always has the next step waiting.

    launch N+1:  numbers -> one copy -> forward -> sample -> last tokens (stay there) -> copy back
    wait N:      the mark behind N's copies, then plain lists

Nothing in between waits for the device. What must look at values to go on (scores of a prompt, several
tokens a row) is computed where it is needed and does wait; such steps say so in their code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from srt.protocols.forward_batch import ForwardBatch, Slice, SliceResult, StepResult
from srt.protocols.worker import WorkerFacts
from srt.runner.decode_graphs import DecodeGraphs
from srt.runner.model_runner import ModelRunner
from srt.runner.scores import score_slices
from srt.runner.staging import Staging
from srt.runner.timeline import Mark, Timeline
from srt.sampling.device_sampler import DeviceSampler, Launched
from srt.wire.params import TokenLogprobs

Scores = list[list[TokenLogprobs] | str]


@dataclass(slots=True, kw_only=True)
class DeviceTicket:
    """A launched step; see `srt.protocols.worker.Ticket`."""

    slices: list[Slice]
    launched: Launched | None
    scores: Scores
    began: Mark
    ended: Mark
    prepare_seconds: float
    launch_seconds: float

    def done(self) -> bool:
        return self.ended.is_reached()

    def wait(self) -> StepResult:
        self.ended.wait()
        result = StepResult(
            slices=[],
            prepare_seconds=self.prepare_seconds,
            launch_seconds=self.launch_seconds,
            forward_seconds=self.ended.seconds_since(self.began),
        )
        if self.launched is None:
            result.slices = collect(self.slices, [], [], [], self.scores)
            return result
        sampled = self.launched.finish()
        slices, tokens = self.slices, sampled.tokens
        logprobs, errors = sampled.logprobs, sampled.errors
        if not any(errors) and not any(logprobs):
            result.plain = tokens[: num_decodes(slices)]
            num = len(result.plain)
            slices, tokens = slices[num:], tokens[num:]
            logprobs, errors = logprobs[num:], errors[num:]
        result.slices = collect(slices, tokens, logprobs, errors, self.scores)
        return result


def num_decodes(slices: list[Slice]) -> int:
    """How many lead the batch."""
    return next((i for i, piece in enumerate(slices) if piece.tokens is not None), len(slices))


def collect(
    slices: list[Slice],
    tokens: list[int],
    logprobs: list[TokenLogprobs | None],
    errors: list[str | None],
    scores: Scores,
) -> list[SliceResult]:
    """`tokens`, `logprobs` and `errors` are those of the slices that sample, `scores` of those that ask
    for them."""
    sampled = zip(tokens, logprobs, errors, strict=True)
    scored = iter(scores)
    results = []
    for piece in slices:
        result = SliceResult(tokens=[])
        if piece.sample:
            token, known, result.error = next(sampled)
            if result.error is None:
                result.tokens = [token]
                result.logprobs = None if known is None else [known]
        if piece.prompt_logprobs is not None:
            found = next(scored) if piece.targets else []
            if isinstance(found, str):
                result = SliceResult(tokens=[], error=found)
            else:
                result.prompt_logprobs = found
        results.append(result)
    return results


class DeviceWorker:
    """Launches from the thread that calls it, which is the one that made `timeline`."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: DeviceSampler,
        facts: WorkerFacts,
        timeline: Timeline,
        graphs: DecodeGraphs,
        staging: Staging,
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self._facts = facts
        self._timeline = timeline
        self._graphs = graphs
        self._staging = staging

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    def close(self) -> None:
        self._timeline.mark().wait()

    def idle(self) -> bool:
        """Records one more decode graph; True while there are more. For when nobody waits."""
        missing = self._graphs.missing
        if missing:
            with torch.inference_mode():
                self._graphs.record(missing[0])
        return len(missing) > 1

    @torch.inference_mode()
    def record(self, show: Callable[[float], None], *, least: bool = False) -> None:
        """Records the decode graphs that are missing; `least`: those of the smallest and the largest
        batch, with which any can be served. The largest comes first: the others fit its memory."""
        missing = self._graphs.missing[::-1]
        wanted = [missing[0], missing[-1]] if least and len(missing) > 1 else missing
        for index, size in enumerate(wanted):
            show(index / len(wanted))
            self._graphs.record(size)
        show(1.0)

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch) -> DeviceTicket:
        entered = perf_counter()
        began = self._timeline.mark()
        self.sampler.open(batch.setups)
        where, pages = self.runner.table.note(batch.table_writes)
        launched: Launched | None = None
        scores: Scores = []
        if self._graphs.fits(batch):
            prepared = perf_counter()
            logits, rows = self._graphs.run(batch, where, pages)
            launched = self._sample(batch.slices, logits, rows)
        else:
            inputs = self.runner.prepare_on(self._staging, batch, where, pages)
            prepared = perf_counter()
            hidden = self.runner.forward(inputs)
            num = len(inputs.sampling)
            if num:
                logits = self.runner.logits(hidden[:num])
                launched = self._sample(inputs.sampling, logits, inputs.sampling_rows)
            if inputs.scoring:
                scores = score_slices(self.runner, self.sampler, inputs.scoring, hidden[num:])
        ended = self._timeline.mark()
        self._staging.used(ended)
        return DeviceTicket(
            slices=batch.slices,
            launched=launched,
            scores=scores,
            began=began,
            ended=ended,
            prepare_seconds=prepared - entered,
            launch_seconds=perf_counter() - prepared,
        )

    def _sample(self, slices: list[Slice], logits: torch.Tensor, rows: torch.Tensor) -> Launched:
        """`rows` and `logits` may be padded."""
        allowed = [piece.allowed for piece in slices]
        launched = self.sampler.launch(
            logits,
            [piece.row for piece in slices],
            rows,
            allowed if any(mask is not None for mask in allowed) else None,
        )
        self.runner.step_ops.remember(self.runner.last_tokens, rows[: len(slices)], launched.tokens)
        return launched
