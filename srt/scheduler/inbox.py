"""What arrives: work, aborts, the drain. Refuses at once what can never run; aborts what is alive."""

from __future__ import annotations

import logging
from heapq import heappop, heappush

from srt.cache.store import KVStore
from srt.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    RequestAborted,
    ShuttingDown,
    TandemError,
)
from srt.protocols.worker import WorkerFacts
from srt.scheduler.constraint import Constraint
from srt.scheduler.finish import Finisher
from srt.scheduler.outbox import Outbox
from srt.scheduler.policy import Shares
from srt.scheduler.queue import Queue
from srt.scheduler.request import Request, Roster
from srt.wire.messages import AbortWork, Drain, Work

log = logging.getLogger(__name__)


class Inbox:
    """Turns messages into requests and ends. Knows deadlines and the drain."""

    def __init__(
        self,
        *,
        facts: WorkerFacts,
        roster: Roster,
        queue: Queue,
        store: KVStore,
        shares: Shares,
        outbox: Outbox,
        finisher: Finisher,
        constraint: Constraint,
    ) -> None:
        self._facts = facts
        self._roster = roster
        self._queue = queue
        self._store = store
        self._shares = shares
        self._outbox = outbox
        self._finisher = finisher
        self._constraint = constraint
        self._end_ids = frozenset(facts.end_token_ids)
        self._num_arrived = 0
        self._deadlines: list[tuple[float, int]] = []
        self.drain_until: float | None = None  # clock seconds; None: open for work

    @property
    def capacity(self) -> int:
        """Tokens that the pool can hold."""
        return self._store.pages.total * self._store.page_size

    def accept(self, work: Work, now: float) -> None:
        """Queues it, or ends it with the reason it can never run or cannot wait."""
        if work.uid in self._roster.live:
            log.error("uid %d is alive already; the second work of that name is dropped", work.uid)
            return
        request = self._make_request(work, now)
        error = self._check(request)
        if error is not None:
            self._finisher.finish(request, "error", now, error=error)
            return
        self._roster.live[work.uid] = request
        self._shares.arrive(request.tenant)
        self._queue.add(request)
        self._constraint.open(request)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, work.uid))
        self._outbox.item(work.uid).opened = work.text

    def _make_request(self, work: Work, now: float) -> Request:
        """`max_tokens` None means as much as context and pool allow."""
        params = work.params
        room = self.room(len(work.token_ids))
        self._num_arrived += 1
        return Request(
            work=work,
            sequence=self._num_arrived,
            arrived=now,
            deadline=None if work.deadline is None else now + work.deadline,
            max_output=max(room, 0) if params.max_tokens is None else params.max_tokens,
            stop_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else self._end_ids),
            tokens=list(work.token_ids),
            prompt_len=len(work.token_ids),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )

    def room(self, prompt_len: int) -> int:
        """Tokens that may follow a prompt of this length. The last one generated needs no KV, so the
        pool has room for one more than its slots."""
        context = self._facts.context_length
        return min(context - prompt_len, self.capacity - prompt_len + 1)

    def _check(self, request: Request) -> TandemError | None:
        if self.drain_until is not None:
            return ShuttingDown("the engine is shutting down and takes nothing new")
        refused = self._constraint.check(request)
        if refused is not None:
            return refused
        prompt_len, wanted = request.prompt_len, request.params.max_tokens
        if prompt_len == 0:
            return InvalidRequest("the prompt has no tokens", param="prompt")
        context = self._facts.context_length
        least = (1 if wanted is None else wanted) + prompt_len
        if least > context:
            return ContextLengthExceeded(
                f"{prompt_len} prompt tokens and {least - prompt_len} to generate are {least}; "
                f"the context length is {context}",
                param="max_tokens" if prompt_len < context else "prompt",
            )
        if prompt_len > self.capacity or least > self.capacity + 1:
            return ContextLengthExceeded(
                f"{prompt_len} prompt tokens and {least - prompt_len} to generate need more than "
                f"the {self.capacity} tokens of KV memory that this engine has",
                param="max_tokens" if prompt_len < self.capacity else "prompt",
            )
        if request.work.leader in self._roster.live:  # all samples of a request or none
            return None
        return self._queue.check(prompt_len)

    def abort(self, message: AbortWork, now: float) -> None:
        """Ends it now, in whatever state; a step on its way with it is ignored. Unknown uids are those
        that ended meanwhile."""
        request = self._roster.live.get(message.uid)
        if request is None:
            return
        self._finisher.finish(
            request,
            "abort",
            now,
            error=RequestAborted(f"aborted by {message.reason}"),
            by=message.reason,
            is_quiet=message.quiet,
        )

    def drain(self, message: Drain, now: float) -> None:
        """What was accepted may run until the time is over; then it is aborted."""
        until = now + message.seconds
        self.drain_until = until if self.drain_until is None else min(self.drain_until, until)

    def expire(self, now: float) -> None:
        """Ends what is past its deadline, and everything once the drain is over."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, uid = heappop(self._deadlines)
            request = self._roster.live.get(uid)
            if request is not None and request.deadline is not None and request.deadline <= now:
                error = DeadlineExceeded(
                    f"not finished within {request.work.deadline:g} s of its arrival"
                )
                self._finisher.finish(request, "error", now, error=error)
        if self.drain_until is not None and now >= self.drain_until:
            for request in list(self._roster.live.values()):
                error_ = ShuttingDown("the engine stopped before this request was through")
                self._finisher.finish(request, "abort", now, error=error_, by="drain")
