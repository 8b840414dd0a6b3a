"""Questions that only the scheduler can answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from srt.cache.store import KVStore
from srt.errors import InvalidRequest, NotFound, NotReady, TandemError
from srt.scheduler.outbox import Outbox
from srt.scheduler.queue import Queue
from srt.scheduler.report import describe_all, describe_one
from srt.scheduler.request import Roster
from srt.wire.convert import to_failure
from srt.wire.messages import Command, Reply

Answers = Callable[[], dict[str, Any]]


class Commands:
    """Answers at once, except for a flush that may wait for the engine to be idle."""

    def __init__(
        self,
        *,
        roster: Roster,
        queue: Queue,
        store: KVStore,
        outbox: Outbox,
        profile: Answers,
        metrics: Answers,
        config: Answers,
        audit: Callable[[], list[str]],
        is_idle: Callable[[], bool],
    ) -> None:
        self._roster = roster
        self._queue = queue
        self._store = store
        self._outbox = outbox
        self._profile = profile
        self._metrics = metrics
        self._config = config
        self._audit = audit
        self._is_idle = is_idle
        self._flushes: list[tuple[float, int]] = []  # (clock seconds until, ticket)

    def run(self, command: Command, now: float) -> None:
        """Puts the answer, or why there is none, into the outbox."""
        try:
            if command.topic == "flush_cache":
                self._ask_flush(command, now)
                return
            body = self._answer(command, now)
        except TandemError as error:
            self._refuse(command.ticket, error)
            return
        self._outbox.answer(Reply(ticket=command.ticket, body=body))

    def _answer(self, command: Command, now: float) -> dict[str, Any]:
        match command.topic:
            case "metrics":
                return self._metrics()
            case "config":
                return self._config()
            case "audit":
                violations = self._audit()
                return {"clean": not violations, "violations": violations}
            case "requests":
                return describe_all(self._roster, self._queue, now)
            case "profile":
                return self._profile()
            case "request":
                found = describe_one(self._roster, self._queue, command.argument, now)
                if found is None:
                    raise NotFound(f"no live request is called {command.argument!r}")
                return found
        raise InvalidRequest(f"the scheduler has no topic {command.topic!r}", param="topic")

    def _ask_flush(self, command: Command, now: float) -> None:
        text = command.argument.strip() or "0"
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= 3600:
            raise InvalidRequest(
                f"flush_cache waits 0 to 3600 seconds for the engine to be idle, not {text!r}",
                param="argument",
            )
        self._flushes.append((now + seconds, command.ticket))

    def settle(self, now: float) -> None:
        """Runs the flushes that wait if the engine is idle; refuses those whose time is over."""
        if not self._flushes:
            return
        if self._is_idle():
            num_pages = self._store.flush()
            for _, ticket in self._flushes:
                self._outbox.answer(Reply(ticket=ticket, body={"freed_pages": num_pages}))
            self._flushes.clear()
            return
        for until, ticket in self._flushes:
            if until <= now:
                live = len(self._roster.live)
                message = f"the cache is flushed only when idle; {live} requests are live"
                self._refuse(ticket, NotReady(message, retry_after=1.0))
        self._flushes = [(until, ticket) for until, ticket in self._flushes if until > now]

    def _refuse(self, ticket: int, error: TandemError) -> None:
        self._outbox.answer(Reply(ticket=ticket, failure=to_failure(error)))
