"""The worker of a GPU whose requests get guesses: a step of decodes with guesses is one recorded piece,
from the draft's first look to the tokens put out. What else a step holds, prompts and rows that need
more than the device's own sampling, is computed behind it, and the draft reads along.

The host learns what was kept when the step is done; only then does it know where the rows go on, so a
step with guesses is waited for before the next is planned (`srt.scheduler.loop`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from time import perf_counter

import numpy as np
import torch
from msgspec.structs import replace

from kernels.transfer import fetch
from srt.protocols.forward_batch import ForwardBatch, Slice, SliceResult, StepResult
from srt.protocols.worker import WorkerFacts
from srt.runner.device_worker import DeviceTicket, DeviceWorker, collect
from srt.runner.inputs import StepInputs
from srt.runner.scores import Scores
from srt.runner.staging import Staging
from srt.runner.timeline import Mark, Timeline
from srt.sampling.launched import Launched
from srt.spec.chain_graphs import ChainGraphs
from srt.spec.device_chain import DeviceChain

NOT_FINITE = "the model's logits are not finite"


@dataclass(slots=True, kw_only=True)
class ChainTicket:
    """A launched step. `guessed` and `others`: the batch's indices, and what is on its way for them."""

    slices: list[Slice]
    guessed: list[int]
    others: list[int]
    verified: torch.Tensor | None  # [len(guessed), W + 2] int64 on the host: tokens, count, is_bad
    launched: Launched | None
    scores: Scores = field(default_factory=list)
    began: Mark
    ended: Mark
    launch_seconds: float

    def done(self) -> bool:
        return self.ended.is_reached()

    def wait(self) -> StepResult:
        self.ended.wait()
        found: list[SliceResult | None] = [None] * len(self.slices)
        if self.verified is not None:
            lines = self.verified.tolist()
            for index, (*tokens, count, is_bad) in zip(self.guessed, lines, strict=True):
                most = min(self.slices[index].draft, len(tokens) - 1)
                found[index] = _outcome(most, tokens[:count], bool(is_bad))
        rest = [self.slices[index] for index in self.others]
        if self.launched is None:
            others = collect(rest, [], [], [], self.scores)
        else:
            got = self.launched.finish()
            others = collect(rest, got.tokens, got.logprobs, got.errors, self.scores)
        for index, result in zip(self.others, others, strict=True):
            found[index] = result
        return StepResult(
            slices=[result for result in found if result is not None],
            launch_seconds=self.launch_seconds,
            forward_seconds=self.ended.seconds_since(self.began),
        )


def _outcome(num_guesses: int, tokens: list[int], is_bad: bool) -> SliceResult:
    if is_bad:
        return SliceResult(tokens=[], error=NOT_FINITE)
    return SliceResult(
        tokens=tokens,
        num_drafted=num_guesses,
        num_deep=num_guesses,
        kept=list(range(len(tokens) - 1)),
    )


class ChainWorker:
    """`plain` computes the steps that ask for no guesses; it shares everything with this one."""

    def __init__(
        self, chain: DeviceChain, graphs: ChainGraphs, plain: DeviceWorker, timeline: Timeline,
        staging: Staging,
    ) -> None:  # fmt: skip
        self.chain, self.graphs, self.plain = chain, graphs, plain
        self._timeline, self._staging = timeline, staging
        self._fresh: set[int] = set()  # rows whose state on the device is that of their last token
        self._carried: dict[int, int] = {}  # by row: behind which position `carry` stands

    @property
    def facts(self) -> WorkerFacts:
        return replace_fields(self.plain.facts, whole_guesses=True)

    def close(self) -> None:
        self.plain.close()

    def idle(self) -> bool:
        """Records one more graph; True while there are more."""
        if missing := self.graphs.missing:
            with torch.inference_mode():
                self.graphs.record(missing[0])
            return True
        return self.plain.idle()

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch) -> ChainTicket | DeviceTicket:
        slices = batch.slices
        for setup in batch.setups:
            self._fresh.discard(setup.row)
            self._carried.pop(setup.row, None)
        if all(piece.tokens is None and not piece.draft for piece in slices):
            self._fresh.difference_update(piece.row for piece in slices)
            return self.plain.launch(batch)
        entered, began = perf_counter(), self._timeline.mark()
        self.plain.sampler.open(batch.setups)
        where, pages = self.chain.target.table.note(batch.table_writes)
        if len(where):
            self.chain.target.apply_table(*self._staging.send([where, pages]))
        guessed: list[int] = []
        if any(
            piece.draft for piece in slices
        ):  # who wants none takes part: elsewhere it costs more
            guessed = [index for index, piece in enumerate(slices) if self._can_guess(piece)]
        others = sorted(set(range(len(slices))) - set(guessed))
        verified = self._guess([slices[index] for index in guessed]) if guessed else None
        launched: Launched | None = None
        scores: Scores = []
        if others:
            launched, scores = self._compute([slices[index] for index in others])
        ended = self._timeline.mark()
        self._staging.used(ended)
        return ChainTicket(
            slices=slices,
            guessed=guessed,
            others=others,
            verified=verified,
            launched=launched,
            scores=scores,
            began=began,
            ended=ended,
            launch_seconds=perf_counter() - entered,
        )

    def _can_guess(self, piece: Slice) -> bool:
        return (
            piece.tokens is None
            and piece.allowed is None
            and piece.row in self._fresh
            and self.plain.sampler.is_plain([piece.row])
        )

    def _guess(self, slices: list[Slice]) -> torch.Tensor:
        most = self.chain.num_guesses
        return fetch(
            self.graphs.run(
                np.array([piece.row for piece in slices], dtype=np.int32),
                np.array([piece.start for piece in slices], dtype=np.int32),
                np.array([min(piece.draft, most) for piece in slices], dtype=np.int32),
            )
        )

    def _compute(self, slices: list[Slice]) -> tuple[Launched | None, Scores]:
        """One token for each of the decodes, and the prompts; the draft takes in what it missed first,
        and then the prompts."""
        chain, target = self.chain, self.chain.target
        slices = [replace(piece, draft=0) if piece.draft else piece for piece in slices]
        nothing = np.empty(0, dtype=np.int32)
        batch = ForwardBatch(step=0, slices=slices)
        pending = [piece for piece in slices if piece.tokens is None and piece.row in self._fresh]
        if pending:
            rows, starts = self._staging.send(
                [
                    np.array([piece.row for piece in pending], dtype=np.int32),
                    np.array([piece.start for piece in pending], dtype=np.int32),
                ]
            )
            chain.extend(rows, starts.long())
        inputs = target.prepare_on(self._staging, batch, nothing, nothing)
        launched, scores = self.plain.sample_and_score(inputs, target.forward(inputs))
        features = target.features
        assert features is not None
        if launched is not None:
            self._begin(slices, inputs, launched.tokens, features)
        self._read_prompts([piece for piece in slices if piece.tokens is not None], features)
        return launched, scores

    def _begin(
        self, slices: list[Slice], inputs: StepInputs, tokens: torch.Tensor, features: torch.Tensor
    ) -> None:
        """Rows that drew a token start their next guesses from it."""
        ends = np.cumsum([piece.length for piece in slices])
        lasts = [int(end) - 1 for end, piece in zip(ends, slices, strict=True) if piece.sample]
        [at] = self._staging.send([np.array(lasts, dtype=np.int64)])
        self.chain.state.begin(inputs.sampling_rows, tokens, features[at])
        self._fresh.update(piece.row for piece in inputs.sampling)

    def _read_prompts(self, prompts: list[Slice], features: torch.Tensor) -> None:
        """The draft's KV of the prompts' tokens, each with the feature of the position before; where
        that is not known, behind a cached prefix, zeros stand for it."""
        if not prompts:
            return
        chain, draft = self.chain, self.chain.draft
        carry = chain.state.carry
        first = len(features) - sum(piece.length for piece in prompts)
        shifted: list[torch.Tensor] = []
        for piece in prompts:
            last = first + piece.length
            if self._carried.get(piece.row) != piece.start:
                carry[piece.row].zero_()
            shifted += [carry[piece.row][None].clone(), features[first : last - 1]]
            carry[piece.row] = features[last - 1]
            self._carried[piece.row] = piece.start + piece.length
            first = last
        nothing = np.empty(0, dtype=np.int32)
        inputs = draft.prepare_on(
            self._staging, ForwardBatch(step=0, slices=prompts), nothing, nothing
        )
        network = chain.network
        network.forward(
            inputs.token_ids,
            network.fuse(torch.cat(shifted)),
            inputs.attention,
            draft.pool,
            draft.backend,
            None,
        )
