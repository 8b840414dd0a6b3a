"""May this request start now? If not, the one reason, with its numbers."""

from __future__ import annotations

from collections.abc import Iterator

from srt.cache.store import KVStore
from srt.metrics.registry import Registry
from srt.scheduler.budget import Growth, Settings, chunk_length, pages_for
from srt.scheduler.policy import Shares, note_overtaking, rank, share_out
from srt.scheduler.promise import Room
from srt.scheduler.queue import Queue
from srt.scheduler.request import Reason, Refusal, Request, Roster, State
from srt.wire.params import CacheReport


class Admission:
    """Gives a waiting request its row and the pages of its whole prompt, or says why not.

    It needs a free row, `max_running` not reached, tokens left in the step, and pages: those of its
    prompt that the cache does not have, plus the growth expected of all that run and of itself (see
    `Growth`). A request that would run alone needs the pages of its prompt only; it was refused on
    arrival if the pool could not hold all of it.
    """

    def __init__(
        self,
        *,
        roster: Roster,
        queue: Queue,
        store: KVStore,
        shares: Shares,
        growth: Growth,
        settings: Settings,
        metrics: Registry,
    ) -> None:
        self._roster = roster
        self._queue = queue
        self._store = store
        self._shares = shares
        self._growth = growth
        self._settings = settings
        self._metrics = metrics
        self._num_admitted = 0
        self._reserved = 0  # pages that those who run are expected to need still
        # the last refusal for want of pages and the state it was made in: saves a match a turn
        self._short: tuple[tuple[int, ...], Refusal] | None = None

    def candidates(self, now: float) -> tuple[Iterator[Request], dict[int, int]]:
        """Who to try in this turn, in order: retracted requests first, then by policy and shares. And
        every other one's place in the policy's own order, when there are several tenants."""
        self._reserved = sum(self._reserve(request) for request in self._roster.active)
        front = self._queue.front
        policy = self._settings.policy
        ranked = rank(self._queue.arrived, policy, now, self._peek)
        places: dict[int, int] = {}
        if self._shares.num_tenants > 1:
            places = {request.uid: index for index, request in enumerate(ranked)}

        def walk() -> Iterator[Request]:
            yield from front
            yield from share_out(ranked, policy, now, self._shares)

        return walk(), places

    def refuse_all(self, room: Room) -> Refusal | None:
        """Why nobody at all can be admitted now, whoever is first: rows or room are used up."""
        active = self._roster.active
        settings = self._settings
        most = min(settings.max_running, self._store.rows.total, settings.max_step_tokens - 1)
        if len(active) >= most:
            return Refusal(reason=Reason.ROWS, needed=1, behind=active[0].uid)
        if room.left() <= 0:
            return Refusal(reason=room.reason, needed=1)
        return None

    def _peek(self, request: Request) -> int:
        limit = _match_limit(request)
        return self._store.cache.peek(request.tokens, request.work.cache_salt, limit)

    def try_admit(
        self, request: Request, now: float, step: int, room: Room, *, is_first: bool
    ) -> Refusal | None:
        """Admits (None) or refuses. `room` is free in the step, `is_first` if no prompt is in it
        yet."""
        refusal = self._refuse_early(request, step, room)
        if refusal is not None:
            return refusal
        store, active = self._store, self._roster.active
        seen = (
            request.uid,
            len(active),
            store.num_available,
            store.cache.num_pages,
            self._growth.tokens,
        )
        if active and self._short is not None and self._short[0] == seen:
            return self._short[1]
        match = store.cache.match(request.tokens, request.work.cache_salt, _match_limit(request))
        remaining = len(request.tokens) - match.num_tokens
        chunk, left = self._settings.chunked_prefill_size, room.left()
        if not chunk_length(remaining, chunk, left, is_first=is_first):
            store.cache.release(match.handle)
            return Refusal(reason=Reason.CHUNK_BUDGET, needed=remaining, free=left)
        needed = self._pages_needed(request) - len(match.pages)
        if needed > store.num_available:
            refusal = Refusal(
                reason=Reason.PAGES,
                needed=needed,
                free=store.pages.num_free,
                evictable=store.cache.num_evictable,
            )
            store.cache.release(match.handle)
            self._short = (seen, refusal)
            return refusal
        lease = store.open(match, request.work.cache_salt)
        assert lease is not None and lease.grow(len(request.tokens))
        request.lease = lease
        request.computed = match.num_tokens
        self._reserved += self._reserve(request)
        self._enter(request, now, match.num_tokens, match.report)
        return None

    def _refuse_early(self, request: Request, step: int, room: Room) -> Refusal | None:
        """The reasons that need no look at the cache."""
        active = self._roster.active
        if request.awaits_grammar:
            return Refusal(reason=Reason.GRAMMAR)
        leader = self._roster.live.get(-1 if request.work.leader is None else request.work.leader)
        if leader is not None and self._settings.radix_cache and not leader.is_shared:
            can_share = request.prompt_len > self._store.page_size and _match_limit(request) > 0
            if can_share and leader is not request:
                return Refusal(reason=Reason.LEADER, behind=leader.uid)
        if step < request.cool_until and active:
            return Refusal(reason=Reason.COOL_DOWN, needed=request.cool_until - step)
        return self.refuse_all(room)

    def _pages_needed(self, request: Request) -> int:
        """Pages for its prompt and everybody's expected growth, before what the cache has."""
        size, length = self._store.page_size, len(request.tokens)
        if not self._roster.active:
            return pages_for(length, size)
        growth = min(request.remaining, self._growth.tokens)
        return pages_for(length + growth, size) + self._reserved

    def _reserve(self, request: Request) -> int:
        """Pages that its growth is expected to take."""
        assert request.lease is not None
        growth = min(request.remaining, self._growth.tokens)
        return request.lease.missing_pages(request.length + growth)

    def _enter(self, request: Request, now: float, cached: int, report: CacheReport) -> None:
        if request in self._queue:
            note_overtaking(self._queue.arrived, request)
        self._queue.remove(request)
        self._num_admitted += 1
        request.admission = self._num_admitted
        request.state = State.PREFILLING
        request.refusal = None
        request.needs_setup = True
        self._roster.active.append(request)
        self._shares.charge(request.tenant, len(request.tokens) - cached)
        if request.admitted is not None:
            return
        request.admitted = now
        request.cached_tokens = cached
        if request.prompt_logprobs is not None:
            report = CacheReport(reason="prompt_logprobs")
        request.cache = report
        if request.is_counted:
            self._metrics.observe("queue_seconds", now - request.arrived)
            self._metrics.add("prefix_tokens_asked_total", request.prompt_len)
            self._metrics.add("prefix_tokens_hit_total", cached, "device")


def _match_limit(request: Request) -> int:
    """Tokens that may come from the cache: all but the last, which must be computed to be followed.
    None of a prompt whose own logprobs are still to be computed."""
    return 0 if request.prompt_logprobs is not None else len(request.tokens) - 1
