"""The one way out. Finished, aborted, rejected and failed requests all pass `Finisher.finish`."""

from __future__ import annotations

import logging

from srt.cache.store import KVStore
from srt.errors import EngineError, TandemError
from srt.metrics.registry import Registry
from srt.protocols.grammar import Grammars
from srt.scheduler.budget import Growth
from srt.scheduler.outbox import Outbox
from srt.scheduler.policy import Shares
from srt.scheduler.queue import Queue
from srt.scheduler.request import Request, Roster, State
from srt.wire.convert import to_failure
from srt.wire.params import Finish, FinishReason

log = logging.getLogger(__name__)

Ending = tuple[FinishReason, int | None]  # why, and the stop id


def ending(request: Request, token: int) -> Ending | None:
    """Does `token`, just appended to `request.tokens`, end it? The reason and the stop id.

    A stop id (the request's own ones, and the model's end tokens unless `ignore_eos`) counts from
    output position `min_tokens` on, counted from 0: that many other tokens come before it. The stop
    id itself is part of the output. It wins over the length.
    """
    if token in request.stop_ids and request.output_len > request.params.min_tokens:
        return "stop", token
    if request.output_len >= request.max_output:
        return "length", None
    return None


class Finisher:
    """Ends requests, from whatever state they are in."""

    def __init__(
        self,
        *,
        roster: Roster,
        queue: Queue,
        store: KVStore,
        shares: Shares,
        growth: Growth,
        outbox: Outbox,
        metrics: Registry,
        grammars: Grammars | None = None,
    ) -> None:
        self._roster = roster
        self._queue = queue
        self._store = store
        self._shares = shares
        self._growth = growth
        self._outbox = outbox
        self._metrics = metrics
        self._grammars = grammars

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        matched: int | None = None,
        error: TandemError | None = None,
        by: str = "",
        is_quiet: bool = False,
    ) -> None:
        """Frees all that the request holds, in whatever state it is, and makes its terminal item.

        Pages whose KV is known to be good stay in the cache for others. A quiet end is one whose
        terminal item somebody else has sent; what was not sent of it yet is dropped. `by` says who
        aborted. A request that was never accepted is not on the roster; for it only the item is made.
        """
        assert request.state is not State.FINISHED, f"request {request.uid} ended twice"
        is_rejected = request.uid not in self._roster.live
        if request.lease is not None:
            keeps = reason != "error" or (error is not None and error.code == "timeout")
            request.lease.release(request.tokens if keeps else None)
            request.lease = None
            self._roster.active.remove(request)
        elif not is_rejected:
            self._queue.remove(request)
        request.state = State.FINISHED
        request.refusal = None
        if request.params.grammar is not None and self._grammars is not None:
            self._grammars.forget(request.uid)
        if not is_rejected:
            del self._roster.live[request.uid]
            self._shares.leave(request.tenant)
            self._queue.note_finish(now)
            self._growth.after_finish()
        if is_quiet:
            self._outbox.drop(request.uid)
        else:
            item = self._outbox.item(request.uid)
            assert item.finish is None, f"request {request.uid} has two terminal items"
            item.finish = Finish(
                reason=reason,
                matched=matched,
                failure=None if error is None else to_failure(error),
                usage=request.usage(),
                timing=request.timing(now),
                cache=request.cache,
            )
        self._note(request, "stop" if is_quiet else reason, now, error, by, is_rejected)

    def _note(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        error: TandemError | None,
        by: str,
        is_rejected: bool,
    ) -> None:
        """One line in the log; and if it is a user's request, the metrics."""
        if request.is_counted:
            self._count(request, reason, now, error, by, is_rejected)
        if is_rejected:
            assert error is not None
            log.info("request %s (%s) refused: %s", request.uid, request.work.rid, error.message)
            return
        level = logging.WARNING if isinstance(error, EngineError) else logging.DEBUG
        log.log(
            level,
            "request %s (%s) ended: %s%s, %d prompt + %d generated tokens",
            request.uid,
            request.work.rid,
            reason,
            f" ({error.message})" if error is not None else "",
            request.prompt_len,
            request.output_len,
        )

    def _count(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        error: TandemError | None,
        by: str,
        is_rejected: bool,
    ) -> None:
        count = self._metrics
        if is_rejected:
            assert error is not None
            count.add("requests_rejected_total", 1, error.code)
            return
        count.add("requests_finished_total", 1, reason)
        if reason == "abort":
            count.add("aborted_total", 1, by)
        count.observe("e2e_seconds", now - request.arrived)
        if request.first_token is not None:
            count.observe("decode_seconds", request.timing(now).decode)
