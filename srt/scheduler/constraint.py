"""Requests with a grammar: their matchers, and what may come next."""

from __future__ import annotations

from functools import partial

from srt.errors import InvalidRequest, TandemError
from srt.metrics.registry import Registry
from srt.protocols.grammar import Grammars
from srt.scheduler.finish import Finisher
from srt.scheduler.request import Request, Roster, State

PATIENCE = 0.005  # seconds an otherwise idle turn waits for a grammar, so that it does not spin


class Constraint:
    """Keeps `Request.allowed` true to the request's tokens. `grammars` None: this engine has none."""

    def __init__(
        self, *, grammars: Grammars | None, roster: Roster, finisher: Finisher, metrics: Registry
    ) -> None:
        self._grammars = grammars
        self._metrics = metrics
        self._roster = roster
        self._finisher = finisher
        self._waiting: dict[int, Request] = {}  # opened, not ready; some may have ended meanwhile

    def check(self, request: Request) -> TandemError | None:
        grammar = request.params.grammar
        if grammar is None or self._grammars is not None:
            return None
        return InvalidRequest("this engine serves no grammars", param=grammar.field)

    def open(self, request: Request) -> None:
        """Of an accepted request. It is not admitted before its grammar is ready."""
        grammar = request.params.grammar
        if grammar is not None and self._grammars is not None:
            self._grammars.open(request.uid, grammar)
            self._waiting[request.uid] = request

    def admit_ready(self, now: float) -> None:
        """Those whose grammar is ready may start; those whose grammar cannot be served end."""
        if not self._waiting or self._grammars is None:
            return
        for uid in [u for u, r in self._waiting.items() if r.state is State.FINISHED]:
            del self._waiting[uid]
        is_idle = len(self._waiting) == len(self._roster.live)
        for opened in self._grammars.ready(PATIENCE if is_idle else 0.0):
            request = self._waiting.pop(opened.uid)
            self._metrics.observe("grammar_compile_seconds", now - request.arrived)
            if opened.error is not None:
                self._metrics.add("grammar_refused_total")
                self._finisher.finish(request, "error", now, error=opened.error)
            else:
                request.allowed = opened.mask
                request.look_ahead = partial(self._grammars.peek, request.uid)

    def follow(self, request: Request, tokens: list[int]) -> TandemError | bool:
        """After these tokens: whether the output is complete, or why it cannot go on."""
        assert self._grammars is not None
        try:
            request.allowed = self._grammars.follow(request.uid, tokens)
        except TandemError as error:
            return error
        return request.allowed is None
