"""A step on its way: what was launched, for whom, and what to do with its results."""

from __future__ import annotations

from dataclasses import dataclass

from srt.errors import InternalError, InvalidRequest, TandemError
from srt.metrics.registry import Registry
from srt.protocols.forward_batch import (
    NOTHING_LEFT,
    ForwardBatch,
    RowSetup,
    Slice,
    SliceResult,
    StepResult,
)
from srt.protocols.worker import Ticket
from srt.scheduler.constraint import Constraint
from srt.scheduler.finish import Finisher, ending
from srt.scheduler.outbox import Outbox
from srt.scheduler.pace import Pace
from srt.scheduler.policy import Shares
from srt.scheduler.promise import Promise
from srt.scheduler.request import Request, State
from srt.wire.params import FinishReason


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """A slice and whose it is. The request may have ended by the time the result is here."""

    request: Request
    slice: Slice
    ends_prefill: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """A launched step."""

    step: int
    pieces: list[Piece]
    num_decodes: int
    ticket: Ticket
    offered: int | None = None  # tokens there was room for beside the decodes; None: no prompt came

    @property
    def has_guesses(self) -> bool:
        return any(piece.slice.draft for piece in self.pieces[: self.num_decodes])

    @property
    def num_decode_tokens(self) -> int:
        """Guesses included."""
        return sum(1 + piece.slice.draft for piece in self.pieces[: self.num_decodes])

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Start and length of each piece of a prompt."""
        return [(p.slice.start, p.slice.length) for p in self.pieces[self.num_decodes :]]


def build_batch(step: int, pieces: list[Piece]) -> ForwardBatch:
    """The batch for these pieces, with the row setups and page table writes they depend on."""
    batch = ForwardBatch(step=step, slices=[piece.slice for piece in pieces])
    for piece in pieces:
        request = piece.request
        lease = request.lease
        assert lease is not None
        if request.needs_setup:
            request.needs_setup = False
            setup = RowSetup(
                row=lease.row,
                params=request.params,
                tokens=list(request.tokens),
                prompt_len=request.prompt_len,
                stop_ids=sorted(request.stop_ids),
                salt=request.work.cache_salt,
            )
            batch.setups.append(setup)
        write = lease.table_write()
        if write is not None:
            batch.table_writes.append(write)
    return batch


class Receiving:
    """Brings a step's results home: commits KV, shares prompts, hands tokens out, ends requests."""

    def __init__(
        self,
        *,
        finisher: Finisher,
        outbox: Outbox,
        shares: Shares,
        constraint: Constraint,
        metrics: Registry,
        pace: Pace,
        promise: Promise,
    ) -> None:
        self._finisher = finisher
        self._outbox = outbox
        self._shares = shares
        self._constraint = constraint
        self._metrics = metrics
        self._pace = pace
        self._promise = promise

    def receive(self, flight: Flight, result: StepResult, now: float) -> None:
        """Requests that ended while the step was on its way are passed over: their rows and pages may
        have new owners, who come after this step on the worker too."""
        assert len(result.slices) == len(flight.pieces), "one result for each slice"
        for piece, got in zip(flight.pieces, result.slices, strict=True):
            request = piece.request
            request.in_flight -= piece.slice.sample
            if request.state is State.FINISHED:
                continue
            if got.error is not None:
                self._finisher.finish(request, "error", now, error=_blame(got.error))
                continue
            assert request.lease is not None
            request.lease.commit(piece.slice.start + piece.slice.length)
            if got.prompt_logprobs is not None and request.prompt_logprobs is not None:
                request.prompt_logprobs.extend(got.prompt_logprobs)
            if piece.ends_prefill:
                self._end_prefill(request, now)
            if got.num_drafted:
                self._count_guesses(request, got)
            if piece.slice.sample:
                self._take_tokens(request, got, now)
            elif piece.ends_prefill:  # max_tokens 0: the prompt was all
                self._finisher.finish(request, "length", now)
        self._weigh(flight, result, now)

    def _weigh(self, flight: Flight, result: StepResult, now: float) -> None:
        """What the step's time says about the price of prompts, and if it was of decodes alone, about
        the worth of guesses."""
        seconds = result.draft_seconds + result.prepare_seconds
        seconds += result.forward_seconds + result.sample_seconds
        chunks = flight.chunks
        self._promise.note(flight.step, flight.num_decode_tokens, chunks, seconds, now)
        if not chunks:
            self._pace.balance.note(
                len(result.slices),
                sum(len(got.tokens) for got in result.slices),
                seconds,
                has_guesses=any(got.num_drafted for got in result.slices),
            )

    def _end_prefill(self, request: Request, now: float) -> None:
        """The prompt is in its pages: offer it to the cache, so that followers and equal prompts
        share it from now on. Where the cache had it already, the lease changes to the cache's pages
        with its next table write, and the duplicates are free: any step that could overwrite them
        comes after that write."""
        assert request.lease is not None
        request.lease.checkpoint(request.tokens)
        if not request.is_shared:
            request.is_shared = True
            if request.is_counted:
                self._metrics.add("prompt_tokens_total", request.prompt_len)
        item = self._outbox.item(request.uid)
        item.usage, item.timing, item.cache = request.usage(), request.timing(now), request.cache
        if request.prompt_logprobs is not None:
            item.prompt_logprobs = request.prompt_logprobs
            request.prompt_logprobs = None

    def _take_tokens(self, request: Request, got: SliceResult, now: float) -> None:
        """Appends the new tokens up to the one that ends the request. Each but the first stands behind
        a right guess, whose KV is in its place."""
        item = self._outbox.item(request.uid)
        wants_logprobs = request.params.logprobs is not None and got.logprobs is not None
        end: tuple[FinishReason, int | None] | None = None
        num_taken = 0
        for token in got.tokens:
            request.tokens.append(token)
            num_taken += 1
            end = ending(request, token)
            if end is not None:
                break
        if num_taken > 1:
            assert request.lease is not None
            request.lease.commit(request.lease.committed + num_taken - 1)
            request.computed += num_taken - 1
        item.tokens = item.tokens + got.tokens[:num_taken]
        if wants_logprobs and got.logprobs is not None:
            item.logprobs = (item.logprobs or []) + got.logprobs[:num_taken]
        self._count_tokens(request, num_taken, now)
        if request.allowed is not None and (end is None or end[0] == "length"):
            outcome = self._constraint.follow(request, got.tokens[:num_taken])
            if outcome is True:
                end = "stop", None
            elif outcome is not False and end is None:
                self._finisher.finish(request, "error", now, error=outcome)
                return
        if end is not None:
            self._finisher.finish(request, end[0], now, matched=end[1])

    def _count_guesses(self, request: Request, got: SliceResult) -> None:
        accepted = len(got.tokens) - 1
        self._pace.learn(request, got.num_deep, accepted)
        request.num_drafted += got.num_drafted
        request.num_accepted += accepted
        if not request.is_counted:
            return
        self._metrics.add("draft_verifications_total")
        self._metrics.add("draft_tokens_total", got.num_drafted)
        for position in range(1, accepted + 1):
            self._metrics.add("draft_accepted_total", 1, str(position))

    def _count_tokens(self, request: Request, num: int, now: float) -> None:
        self._shares.charge(request.tenant, num)
        before, request.last_token = request.last_token, now
        if request.first_token is None:
            request.first_token = now
        if not request.is_counted:
            return
        self._metrics.add("generation_tokens_total", num)
        if before is None:
            self._metrics.observe("ttft_seconds", now - request.arrived)
            admitted = request.arrived if request.admitted is None else request.admitted
            self._metrics.observe("prefill_seconds", now - admitted)
        else:
            self._metrics.observe("itl_seconds", now - before)
            self._metrics.add("itl_broken_total", int(self._promise.is_broken(now - before)))


def _blame(error: str) -> TandemError:
    """Whose fault a slice's failure is: bans are the request's, all else is ours."""
    if error == NOTHING_LEFT:
        return InvalidRequest(f"logit_bias: {error}", param="logit_bias")
    return InternalError(f"the model failed on this request: {error}")
