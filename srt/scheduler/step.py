"""A step on its way: what was launched, for whom, and what to do with its results."""

from __future__ import annotations

from dataclasses import dataclass, field

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
from srt.scheduler.finish import Ending, Finisher, ending
from srt.scheduler.outbox import Outbox
from srt.scheduler.pace import Pace
from srt.scheduler.policy import Shares
from srt.scheduler.promise import Promise
from srt.scheduler.request import Request, State

FINISHED = State.FINISHED


@dataclass(slots=True, kw_only=True, eq=False)
class Plan:
    """What the next step computes, and for whom: `slices[i]` is `requests[i]`'s share. The first
    `num_decodes` are decodes, the others prompts. A request may have ended by the time its result
    is here."""

    requests: list[Request] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    num_decodes: int = 0
    num_guesses: int = 0  # that the decodes may verify
    offered: int | None = None  # tokens there was room for beside the decodes; None: no prompt came

    @property
    def has_prompts(self) -> bool:
        return len(self.slices) > self.num_decodes

    @property
    def num_decode_tokens(self) -> int:
        """Guesses included."""
        return self.num_decodes + self.num_guesses

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Start and length of each piece of a prompt."""
        return [(piece.start, piece.length) for piece in self.slices[self.num_decodes :]]


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """A launched step."""

    step: int
    plan: Plan
    ticket: Ticket


def build_batch(step: int, plan: Plan) -> ForwardBatch:
    """The batch for this plan, with the row setups and page table writes it depends on."""
    batch = ForwardBatch(step=step, slices=plan.slices)
    for request in plan.requests:
        lease = request.lease
        assert lease is not None
        if request.needs_setup:
            request.needs_setup = False
            batch.setups.append(_set_up(request, lease.row))
        if lease.needs_write and (write := lease.table_write()) is not None:
            batch.table_writes.append(write)
    return batch


def _set_up(request: Request, row: int) -> RowSetup:
    return RowSetup(
        row=row,
        params=request.params,
        tokens=list(request.tokens),
        prompt_len=request.prompt_len,
        stop_ids=sorted(request.stop_ids),
        salt=request.work.cache_salt,
    )


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
        plan, num_plain = flight.plan, len(result.plain)
        assert num_plain <= plan.num_decodes, "a prompt's result has no short form"
        assert num_plain + len(result.slices) == len(plan.slices), "one result for each slice"
        requests, tokens = plan.requests[:num_plain], list(result.plain)
        longer: list[tuple[Request, Slice, SliceResult]] = []
        behind = slice(num_plain, None)
        for found in zip(plan.requests[behind], plan.slices[behind], result.slices, strict=True):
            request, piece, got = found
            if piece.tokens is None and got.is_plain:
                requests.append(request)
                tokens.append(got.tokens[0])
            else:
                longer.append(found)
        self._receive_plain(requests, tokens, now)
        for request, piece, got in longer:
            self._receive_one(request, piece, got, now)
        self._weigh(flight, result, now)

    def _receive_plain(self, requests: list[Request], tokens: list[int], now: float) -> None:
        """One token for each of these requests, which decode. The loop does what every one of them
        needs; the few that may end here come after it."""
        given: dict[int, int] = {}
        served: dict[str, int] = {}
        gaps: dict[float, int] = {}  # by the time of the token before it: how many
        marked: list[tuple[Request, int]] = []
        for request, token in zip(requests, tokens, strict=True):
            request.in_flight -= 1
            if request.state is FINISHED:
                continue
            text, lease, before = request.tokens, request.lease, request.last_token
            assert lease is not None and before is not None, "it decodes, so its prompt is computed"
            lease.committed = len(text)
            text.append(token)
            given[request.uid] = token
            tenant = request.tenant
            served[tenant] = served.get(tenant, 0) + 1
            if request.is_counted:
                gaps[before] = gaps.get(before, 0) + 1
            request.last_token = now
            is_last = len(text) >= request.limit or token in request.stop_ids
            if is_last or request.allowed is not None:
                marked.append((request, token))
        if not given:
            return
        self._outbox.put_tokens(given)
        for tenant, num in served.items():
            self._shares.charge(tenant, num)
        self._count_gaps([(now - before, num) for before, num in gaps.items()], sum(gaps.values()))
        for request, token in marked:
            self._settle(request, [token], ending(request, token), now)

    def _receive_one(self, request: Request, piece: Slice, got: SliceResult, now: float) -> None:
        request.in_flight -= piece.sample
        if request.state is FINISHED:
            return
        if got.error is not None:
            self._finisher.finish(request, "error", now, error=_blame(got.error))
            return
        end = piece.start + piece.length
        assert request.lease is not None
        request.lease.commit(end)
        if got.prompt_logprobs is not None and request.prompt_logprobs is not None:
            request.prompt_logprobs.extend(got.prompt_logprobs)
        if piece.tokens is not None and end == len(request.tokens):
            self._end_prefill(request, now)
            if not piece.sample:  # max_tokens 0: the prompt was all
                self._finisher.finish(request, "length", now)
        if got.num_drafted:
            self._count_guesses(request, got)
        if piece.sample:
            self._take_tokens(request, got, now)

    def _weigh(self, flight: Flight, result: StepResult, now: float) -> None:
        """What the step's time says about the price of prompts, and if it was of decodes alone, about
        the worth of guesses."""
        plan = flight.plan
        seconds = result.draft_seconds + result.prepare_seconds
        seconds += result.forward_seconds + result.sample_seconds
        if self._promise.limit is not None:
            decodes, chunks = plan.num_decode_tokens, plan.chunks
            self._promise.note(flight.step, decodes, chunks, seconds, now)
        if self._pace.guesses and not plan.has_prompts:
            self._pace.balance.note(
                len(plan.slices),
                len(result.plain) + sum(len(got.tokens) for got in result.slices),
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
        end: Ending | None = None
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
        if end is not None or request.allowed is not None:
            self._settle(request, got.tokens[:num_taken], end, now)

    def _settle(self, request: Request, tokens: list[int], end: Ending | None, now: float) -> None:
        """Ends the request whose new `tokens` end it, or are all that its grammar permits."""
        if request.allowed is not None and (end is None or end[0] == "length"):
            outcome = self._constraint.follow(request, tokens)
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
        if before is None:
            self._metrics.add("generation_tokens_total", num)
            self._metrics.observe("ttft_seconds", now - request.arrived)
            admitted = request.arrived if request.admitted is None else request.admitted
            self._metrics.observe("prefill_seconds", now - admitted)
        else:
            self._count_gaps([(now - before, 1)], num)

    def _count_gaps(self, gaps: list[tuple[float, int]], num_tokens: int) -> None:
        """`num_tokens` came; `gaps`: seconds since the one before, and how many requests waited so
        long."""
        self._metrics.add("generation_tokens_total", num_tokens)
        self._metrics.observe_all("itl_seconds", gaps)
        if self._promise.limit is not None:
            broken = sum(num for gap, num in gaps if self._promise.is_broken(gap))
            self._metrics.add("itl_broken_total", broken)


def _blame(error: str) -> TandemError:
    """Whose fault a slice's failure is: bans are the request's, all else is ours."""
    if error == NOTHING_LEFT:
        return InvalidRequest(f"logit_bias: {error}", param="logit_bias")
    return InternalError(f"the model failed on this request: {error}")
