"""The running requests' share of a step, and what happens when pages run out: retraction."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from srt.cache.store import KVStore
from srt.metrics.registry import Registry
from srt.protocols.forward_batch import Slice
from srt.scheduler.budget import Growth
from srt.scheduler.pace import Pace
from srt.scheduler.queue import Queue
from srt.scheduler.request import Request, Roster, State
from srt.scheduler.step import Plan

log = logging.getLogger(__name__)

RUNNING = State.RUNNING
COOL_DOWN_STEPS = 8  # a retracted request stays out that long, unless nothing else runs


@dataclass(slots=True, eq=False)
class Due:
    """Who decodes in the next step, and what that takes."""

    requests: list[Request] = field(default_factory=list)
    growing: list[Request] = field(default_factory=list)  # those that need another page
    shortage: int = 0  # pages that cannot be had, whatever is evicted
    # Whether one cannot be planned before its last token is here: what a grammar permits next depends
    # on it.
    needs_a_token: bool = False

    @property
    def must_land(self) -> bool:
        """Whether the step cannot be planned before what is in flight has come home."""
        return self.shortage > 0 or self.needs_a_token


class Decode:
    """A slice for every running request that may still generate a token, with room for guesses."""

    def __init__(
        self,
        *,
        roster: Roster,
        queue: Queue,
        store: KVStore,
        growth: Growth,
        metrics: Registry,
        pace: Pace,
    ) -> None:
        self._roster = roster
        self._queue = queue
        self._store = store
        self._growth = growth
        self._metrics = metrics
        self._pace = pace

    def due(self) -> Due:
        """One look at everybody. Those whose length alone ends them are not run again, whatever is
        still in flight."""
        due = Due()
        requests, growing = due.requests, due.growing
        for request in self._roster.active:
            length = len(request.tokens) + request.in_flight
            if request.state is not RUNNING or length >= request.limit:
                continue
            lease = request.lease
            assert lease is not None
            requests.append(request)
            if length > lease.capacity:
                growing.append(request)
            if request.allowed is not None and request.in_flight:
                due.needs_a_token = True
        if growing:
            needed = sum(_missing(request) for request in growing)
            due.shortage = max(needed - self._store.num_available, 0)
        return due

    def make_room(self, now: float, step: int) -> None:
        """Retracts until the next decode step has its pages. Nothing may be in flight.

        The victim is the one that is cheapest to compute again: the fewest tokens computed, of equals
        the one admitted last. The oldest request is never one, so somebody always gets on, and in
        the end everybody is the oldest.
        """
        while self.due().shortage:
            active = self._roster.active
            oldest = min(active, key=lambda r: r.sequence)
            victims = [request for request in active if request is not oldest]
            assert victims, "a single request fits the pool; it was checked on arrival"
            self._retract(min(victims, key=lambda r: (r.computed, -r.admission)), step)

    def _retract(self, request: Request, step: int) -> None:
        """Back to the front of the queue, with everything generated so far. Its full pages are offered
        to the cache, so that what nobody needs meanwhile is not computed again."""
        lease = request.lease
        assert lease is not None and request.in_flight == 0
        self._metrics.add("retractions_total")
        self._metrics.add("retracted_tokens_total", lease.committed)
        log.info(
            "request %s (%s) retracted with %d tokens: KV pages ran out",
            request.uid,
            request.work.rid,
            len(request.tokens),
        )
        lease.release(request.tokens)
        request.lease = None
        request.computed = 0
        request.state = State.WAITING
        request.retractions += 1
        request.cool_until = step + COOL_DOWN_STEPS
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = [None]  # the prompt was not through: all of it comes again
        self._roster.active.remove(request)
        self._queue.put_back(request)
        self._growth.after_retraction()

    def plan(self, due: Due) -> Plan:
        """A slice of one token for each; its value is on the worker, perhaps not here yet. Everybody
        has a page for it before anybody gets room for guesses."""
        for request in due.growing:
            assert request.lease is not None and request.lease.grow(request.length)
        shares = self._pace.allot(due.requests) if self._pace.guesses else []
        plan = Plan(requests=due.requests, num_decodes=len(due.requests))
        for request in due.requests:
            lease = request.lease
            assert lease is not None
            length = request.computed = len(request.tokens) + request.in_flight
            request.in_flight += 1
            plan.slices.append(
                Slice(
                    row=lease.row,
                    start=length - 1,
                    length=1,
                    tokens=None,
                    sample=True,
                    allowed=request.allowed,
                )
            )
        self._add_guesses(plan, shares)
        return plan

    def _add_guesses(self, plan: Plan, shares: list[int]) -> None:
        """Room for guesses, as far as there are pages for them. `shares`: how many each may have."""
        for request, piece, most in zip(plan.requests, plan.slices, shares, strict=False):
            assert request.lease is not None
            if most and request.lease.grow(piece.start + 1 + most):
                piece.draft, piece.look_ahead = most, request.look_ahead
                plan.num_guesses += most


def _missing(request: Request) -> int:
    assert request.lease is not None
    return request.lease.missing_pages(request.length)
