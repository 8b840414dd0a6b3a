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
from itertools import starmap
from time import perf_counter

import torch

from srt.protocols.forward_batch import ForwardBatch, Slice, SliceResult, StepResult
from srt.protocols.worker import WorkerFacts
from srt.runner.decode_graphs import DecodeGraphs
from srt.runner.inputs import StepInputs
from srt.runner.model_runner import ModelRunner
from srt.runner.prefill_graphs import PrefillCudaGraphRunner
from srt.runner.scores import Scores, join_scores, score_slices
from srt.runner.staging import Staging
from srt.runner.timeline import Mark, Timeline
from srt.sampling.device_sampler import DeviceSampler
from srt.sampling.launched import Launched
from srt.wire.params import TokenLogprobs


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
    sampled = starmap(_outcome, zip(tokens, logprobs, errors, strict=True))
    return join_scores(slices, sampled, scores)


def _outcome(token: int, known: TokenLogprobs | None, error: str | None) -> SliceResult:
    if error is not None:
        return SliceResult(tokens=[], error=error)
    return SliceResult(tokens=[token], logprobs=None if known is None else [known])


class DeviceWorker:
    """Launches from the thread that calls it, which is the one that made `timeline`."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: DeviceSampler,
        facts: WorkerFacts,
        timeline: Timeline,
        decodes: DecodeGraphs,
        prefills: PrefillCudaGraphRunner,
        staging: Staging,
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self._facts = facts
        self.timeline = timeline
        self.decodes = decodes
        self.prefills = prefills
        self.staging = staging

    @property
    def facts(self) -> WorkerFacts:
        return self._facts

    def close(self) -> None:
        self.timeline.forget()

    @torch.inference_mode()
    def idle(self) -> bool:
        """Records one more graph; True while there are more. For when nobody waits."""
        if decodes := self.decodes.missing:
            self.decodes.record(decodes[0])
        elif prefills := self.prefills.missing:
            self.prefills.record(prefills[0])
        return bool(self.decodes.missing or self.prefills.missing)

    @torch.inference_mode()
    def record_least(self, show: Callable[[float], None]) -> None:
        """Records the decode graphs of the largest and the smallest batch: with these any can be served.
        The largest comes first: the others fit its memory."""
        missing = self.decodes.missing
        wanted = [missing[-1], missing[0]] if len(missing) > 1 else missing
        for index, size in enumerate(wanted):
            show(index / len(wanted))
            self.decodes.record(size)
        show(1.0)

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch) -> DeviceTicket:
        entered = perf_counter()
        began = self.timeline.mark()
        self.sampler.open(batch.setups)
        where, pages = self.runner.table.note(batch.table_writes)
        launched: Launched | None = None
        scores: Scores = []
        if self.decodes.fits(batch):
            prepared = perf_counter()
            logits, rows = self.decodes.run(batch, where, pages)
            launched = self.sample(batch.slices, logits, rows)
        else:
            inputs = self.runner.prepare_on(self.staging, batch, where, pages)
            prepared = perf_counter()
            if self.prefills.can_run(inputs):
                hidden = self.prefills.run(inputs)
            else:
                hidden = self.runner.forward(inputs)
            launched, scores = self.sample_and_score(inputs, hidden)
        ended = self.timeline.mark()
        self.staging.used(ended)
        return DeviceTicket(
            slices=batch.slices,
            launched=launched,
            scores=scores,
            began=began,
            ended=ended,
            prepare_seconds=prepared - entered,
            launch_seconds=perf_counter() - prepared,
        )

    def sample_and_score(
        self, inputs: StepInputs, hidden: torch.Tensor
    ) -> tuple[Launched | None, Scores]:
        """What the slices of a step that no graph had want of its hidden states, see `StepInputs.keep`:
        tokens, and scores of prompts, for which it waits."""
        num = len(inputs.sampling)
        launched: Launched | None = None
        scores: Scores = []
        if num:
            logits = self.runner.logits(hidden[:num])
            launched = self.sample(inputs.sampling, logits, inputs.sampling_rows)
        if inputs.scoring:
            scores = score_slices(self.runner, self.sampler, inputs.scoring, hidden[num:])
        return launched, scores

    def sample(self, slices: list[Slice], logits: torch.Tensor, rows: torch.Tensor) -> Launched:
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
