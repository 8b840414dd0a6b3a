"""The prompts' share of a step: chunks of those that are under way, then newcomers."""

from __future__ import annotations

from srt.protocols.forward_batch import Slice
from srt.scheduler.admission import Admission
from srt.scheduler.budget import Settings, chunk_length
from srt.scheduler.promise import Room
from srt.scheduler.queue import Queue
from srt.scheduler.request import Reason, Refusal, Request, Roster, State
from srt.scheduler.step import Plan


class Prefill:
    """Fills what the decodes left of a step with prompts, in order of admission."""

    def __init__(
        self, *, roster: Roster, queue: Queue, admission: Admission, settings: Settings
    ) -> None:
        self._roster = roster
        self._queue = queue
        self._admission = admission
        self._settings = settings

    def fill(self, plan: Plan, now: float, step: int, room: Room) -> None:
        """Adds prompts to the plan, for what `room` there is. Afterwards every request that waits, or
        has part of its prompt waiting, knows why."""
        if plan.num_decodes < len(self._roster.active):
            for request in self._roster.active:
                if request.state is State.PREFILLING:
                    self._cut(request, room, plan)
        if len(self._queue):
            self._admit(plan, now, step, room)

    def _admit(self, plan: Plan, now: float, step: int, room: Room) -> None:
        refusal = self._admission.refuse_all(room)
        if refusal is not None:  # ranking a long queue would be for nothing
            for request in self._queue:
                request.refusal = refusal
            return
        candidates, places = self._admission.candidates(now)
        blocked: Request | None = None
        tried: list[tuple[Request, Refusal]] = []
        for request in candidates:
            is_first = not plan.has_prompts
            refusal = self._admission.try_admit(request, now, step, room, is_first=is_first)
            if refusal is None:
                self._cut(request, room, plan)
                continue
            request.refusal = refusal
            tried.append((request, refusal))
            if refusal.reason not in (
                Reason.LEADER,
                Reason.GRAMMAR,
            ):  # no one else need share these
                blocked = request
                break
        if blocked is not None:
            self._refuse_the_rest(blocked, tried, places)

    def _refuse_the_rest(
        self, blocked: Request, tried: list[tuple[Request, Refusal]], places: dict[int, int]
    ) -> None:
        """Nobody passes one that is blocked: small requests could keep a large one out for ever."""
        assert blocked.refusal is not None
        behind = Refusal(reason=Reason.BEHIND, behind=blocked.uid)
        if blocked.refusal.reason in (Reason.ROWS, Reason.TOKEN_BUDGET, Reason.PROMISE):
            behind = blocked.refusal  # the same for everybody
        unfair = Refusal(reason=Reason.FAIRNESS, behind=blocked.uid)
        limit = places.get(blocked.uid, -1)
        for request in self._queue:
            is_passed_over = bool(places) and places.get(request.uid, limit) < limit
            request.refusal = unfair if is_passed_over else behind
        for request, refusal in tried:  # these have been told a reason of their own
            request.refusal = refusal

    def _cut(self, request: Request, room: Room, plan: Plan) -> None:
        """Appends the request's next chunk, or says why nothing of it goes into this step."""
        start, total = request.computed, len(request.tokens)
        chunk, left = self._settings.chunked_prefill_size, room.left(request.computed)
        length = chunk_length(total - start, chunk, left, is_first=not plan.has_prompts)
        if length <= 0:
            reason = room.reason if left <= 0 else Reason.CHUNK_BUDGET
            request.refusal = Refusal(reason=reason, needed=total - start, free=left)
            return
        room.take(start, length)
        request.refusal = None
        assert request.lease is not None
        end = start + length
        is_last = end == total
        piece = Slice(
            row=request.lease.row,
            start=start,
            length=length,
            tokens=request.tokens[start:end],
            sample=is_last and request.max_output > 0,
        )
        if piece.sample:
            piece.allowed = request.allowed
        if request.prompt_logprobs is not None:
            piece.prompt_logprobs = request.params.prompt_logprobs
            piece.targets = request.tokens[start + 1 : end + 1]
        request.computed = end
        if is_last:
            request.state = State.RUNNING
            request.in_flight += piece.sample
        plan.requests.append(request)
        plan.slices.append(piece)
