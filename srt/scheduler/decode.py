"""The running requests' share of a step, and what happens when pages run out: retraction."""

from __future__ import annotations

import logging

from srt.cache.store import KVStore
from srt.metrics.registry import Registry
from srt.protocols.forward_batch import Slice
from srt.scheduler.budget import Growth
from srt.scheduler.pace import Pace
from srt.scheduler.queue import Queue
from srt.scheduler.request import Request, Roster, State
from srt.scheduler.step import Piece

log = logging.getLogger(__name__)

COOL_DOWN_STEPS = 8  # a retracted request stays out that long, unless nothing else runs


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

    def _due(self) -> list[Request]:
        """Those whose length alone ends them are not run again, whatever is still in flight."""
        return [r for r in self._roster.active if r.state is State.RUNNING and r.remaining > 0]

    def shortage(self) -> int:
        """Pages that the next decode step lacks, after evicting all that can be. 0 or less: none."""
        needed = 0
        for request in self._due():
            assert request.lease is not None
            needed += request.lease.missing_pages(request.length)
        return needed - self._store.num_available if needed else 0

    def needs_a_token(self) -> bool:
        """Whether one that is due cannot be planned before its last token is here: what a grammar
        permits next depends on it."""
        return any(r.in_flight and r.allowed is not None for r in self._due())

    def make_room(self, now: float, step: int) -> None:
        """Retracts until the next decode step has its pages. Nothing may be in flight.

        The victim is the one that is cheapest to compute again: the fewest tokens computed, of equals
        the one admitted last. The oldest request is never one, so somebody always gets on, and in
        the end everybody is the oldest.
        """
        while self.shortage() > 0:
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

    def plan(self) -> list[Piece]:
        """A slice of one token for each; its value is on the worker, perhaps not here yet. Everybody
        has a page for it before anybody gets room for guesses."""
        due, pieces = self._due(), []
        for request in due:
            assert request.lease is not None and request.lease.grow(request.length)
        for request, most in zip(due, self._pace.allot(due), strict=True):
            lease, length = request.lease, request.length
            assert lease is not None
            request.computed = length
            request.in_flight += 1
            piece = Slice(
                row=lease.row,
                start=length - 1,
                length=1,
                tokens=None,
                sample=True,
                allowed=request.allowed,
            )
            if most and lease.grow(length + most):
                piece.draft, piece.look_ahead = most, request.look_ahead
            pieces.append(Piece(request=request, slice=piece, ends_prefill=False))
        return pieces
