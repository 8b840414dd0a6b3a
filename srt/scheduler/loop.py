"""The scheduler: one turn takes messages, launches a step and brings one home.

    depth 0    turn:  inbox -> plan N   -> launch N   -> wait N -> process N -> send
    depth 1    turn:  inbox -> plan N+1 -> launch N+1 -> wait N -> process N -> send

With depth 1 the worker computes N+1 while N's results are processed; a request that turns out to
have ended in N has one slice in N+1 whose result is passed over. Both give the same tokens.

Time comes from the injected clock and nowhere else, and nothing depends on the order of a set: the
same messages, clock readings and step results give the same steps (`srt.scheduler.journal`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from srt.cache.store import KVStore
from srt.errors import EngineDead, InternalError
from srt.metrics.registry import Registry
from srt.protocols.grammar import Grammars
from srt.protocols.worker import Idler, Worker
from srt.scheduler.admission import Admission
from srt.scheduler.budget import Growth, Settings
from srt.scheduler.commands import Commands
from srt.scheduler.constraint import Constraint
from srt.scheduler.decode import Decode
from srt.scheduler.finish import Finisher
from srt.scheduler.inbox import Inbox
from srt.scheduler.journal import Recorder
from srt.scheduler.outbox import Outbox
from srt.scheduler.pace import Pace
from srt.scheduler.policy import Shares
from srt.scheduler.prefill import Prefill
from srt.scheduler.profile import StepLog, StepRecord
from srt.scheduler.promise import Promise
from srt.scheduler.queue import Queue
from srt.scheduler.request import Roster
from srt.scheduler.step import Flight, Plan, Receiving, build_batch
from srt.wire.channels import Sender
from srt.wire.messages import AbortWork, Command, Drain, Turn, Work, WorkMessage

log = logging.getLogger(__name__)


class Scheduler:
    """Everything about requests, nothing about tensors. Not thread safe: one caller of `turn`."""

    def __init__(
        self,
        *,
        worker: Worker,
        store: KVStore,
        outbox: Sender,
        settings: Settings,
        clock: Callable[[], float],
        config: Callable[[], dict[str, Any]] = dict,
        recorder: Recorder | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        facts = worker.facts
        self._recorder = recorder
        self._worker = worker
        self._store = store
        self._settings = settings
        self._clock = clock
        self._roster = Roster()
        self._queue = Queue(settings.max_queued, settings.max_queued_tokens)
        self._outbox = Outbox(outbox)
        self._registry = Registry()
        shares, growth = Shares(), Growth()
        roster, queue, metrics = self._roster, self._queue, self._registry
        finisher = Finisher(
            roster=roster, queue=queue, store=store, shares=shares, growth=growth,
            outbox=self._outbox, metrics=metrics, grammars=grammars,
        )  # fmt: skip
        self._finisher = finisher
        constraint = Constraint(
            grammars=grammars, roster=roster, finisher=finisher, metrics=metrics
        )
        self._constraint = constraint
        self._inbox = Inbox(
            facts=facts, roster=roster, queue=queue, store=store, shares=shares,
            outbox=self._outbox, finisher=finisher, constraint=constraint,
        )  # fmt: skip
        pace = Pace(
            most=settings.draft_tokens,
            budget=min(settings.draft_budget, settings.max_step_tokens // 2),  # prompts need room
            is_eager=settings.draft_eager,
            knows_when=settings.draft_knows_when,
            is_whole=facts.whole_guesses,
        )
        self._promise = Promise(settings.max_itl)
        self._decode = Decode(
            roster=roster, queue=queue, store=store, growth=growth, metrics=metrics, pace=pace
        )
        admission = Admission(
            roster=roster, queue=queue, store=store, shares=shares, growth=growth,
            settings=settings, metrics=metrics,
        )  # fmt: skip
        self._prefill = Prefill(roster=roster, queue=queue, admission=admission, settings=settings)
        self._receiving = Receiving(
            finisher=finisher, outbox=self._outbox, shares=shares, constraint=constraint,
            metrics=metrics, pace=pace, promise=self._promise,
        )  # fmt: skip
        self._steps = StepLog(settings.step_log, self._promise.describe)
        self._commands = Commands(
            roster=roster, queue=queue, store=store, outbox=self._outbox, profile=self.profile,
            metrics=self.stats, config=config, audit=self.audit, is_idle=self._is_idle,
        )  # fmt: skip
        self._flights: deque[Flight] = deque()
        self._step = 0  # number of the next step
        for use, size in facts.memory_bytes.items():
            metrics.put("memory_bytes", size, use)

    def _is_idle(self) -> bool:
        return not self._roster.live and not self._flights

    # --- one turn ---------------------------------------------------------------------------------

    def turn(self, messages: Sequence[WorkMessage]) -> bool:
        """Takes the messages, moves everything one step on, sends what came of it. True: there is more
        to do, call again at once. False: idle until a message comes.

        Raises what a step of the worker raised, after every live request got its terminal item: the
        process is to end.
        """
        if self._recorder is not None:
            self._recorder.begin_turn(messages)
        times = [self._clock()]
        now = times[0]
        record = StepRecord()
        for message in messages:
            self._take(message, now)
        self._inbox.expire(now)
        self._constraint.admit_ready(now)
        times.append(self._clock())
        try:
            plan = self._plan(now)
            if len(self._queue):
                record.reasons = {r.value: n for r, n in self._queue.reasons().items()}
            times.append(self._clock())
            if plan.slices:
                self._launch(plan)
            times.append(self._clock())
            self._outbox.flush(self._step)  # what the messages gave need not wait for the step
            ahead = self._settings.depth if plan.slices else 0
            if len(self._flights) > ahead:
                self._collect(record)
        except Exception as error:
            self._fail(error)
            raise
        self._commands.settle(now)
        # A step's own times: `wait` and `process` were noted by `_collect`.
        processed = self._clock()
        self._outbox.flush(self._step)
        sent = self._clock()
        inside = record.stages.get("wait", 0.0) + record.stages.get("process", 0.0)
        record.stages["inbox"] = times[1] - times[0]
        record.stages["schedule"] = times[2] - times[1]
        record.stages["launch"] = times[3] - times[2]
        record.stages["send"] = max(processed - times[3] - inside, 0.0) + sent - processed
        self._note(record)
        return not self._is_idle()

    def idle(self) -> bool:
        """Between turns: lets the worker do a piece of what it keeps for quiet moments, if this is one.
        True: it has more. Raises what the worker raises; the process is to end then."""
        worker = self._worker
        return isinstance(worker, Idler) and self._is_idle() and worker.idle()

    def _take(self, message: WorkMessage, now: float) -> None:
        match message:
            case Work():
                self._inbox.accept(message, now)
            case AbortWork():
                self._inbox.abort(message, now)
            case Command():
                self._commands.run(message, now)
            case Turn():
                self._outbox.answer(Turn(number=message.number))
            case Drain():
                self._inbox.drain(message, now)

    def _plan(self, now: float) -> Plan:
        """The next step: decodes first, then prompts. If pages are short, what is in
        flight comes home first: it may free some, and only then is it known what to retract. So it
        does if a grammar runs: leaving that request out instead would halve its pace; and so does a
        step with guesses: before, nobody knows at which positions its rows go on."""
        if any(flight.plan.num_guesses for flight in self._flights):
            self._land()
        due = self._decode.due()
        if due.must_land:
            self._land()
            self._decode.make_room(now, self._step)
            due = self._decode.due()
        plan = self._decode.plan(due)
        decode_tokens = plan.num_decode_tokens
        room = self._promise.room(decode_tokens, self._settings.max_step_tokens - decode_tokens)
        self._prefill.fill(plan, now, self._step, room)
        plan.offered = room.offered
        return plan

    def _land(self) -> None:
        """Brings home all that is in flight."""
        while self._flights:
            home = StepRecord()
            self._collect(home)
            self._note(home)

    def _launch(self, plan: Plan) -> None:
        step = self._step
        self._step += 1
        ticket = self._worker.launch(build_batch(step, plan))
        self._flights.append(Flight(step=step, plan=plan, ticket=ticket))
        if plan.offered is not None:
            self._registry.put("prefill_room_tokens", plan.offered)
        self._registry.add("steps_total")

    def _collect(self, record: StepRecord) -> None:
        """Waits for the oldest step in flight and processes its results."""
        flight = self._flights[0]
        started = self._clock()
        result = flight.ticket.wait()
        waited = self._clock()
        self._flights.popleft()
        self._receiving.receive(flight, result, waited)
        plan = flight.plan
        record.step = flight.step
        record.num_decodes = plan.num_decodes
        record.num_prefill_tokens = sum(length for _, length in plan.chunks)
        record.offered = plan.offered
        record.phases = {
            "draft": result.draft_seconds,
            "prepare": result.prepare_seconds,
            "launch": result.launch_seconds,
            "forward": result.forward_seconds,
            "sample": result.sample_seconds,
        }
        record.stages["wait"] = waited - started
        record.stages["process"] = self._clock() - waited

    def _fail(self, error: Exception) -> None:
        """A step raised, so the worker's state is unknown. The requests it held end with an internal
        error, those that wait because the engine is going; then all of it is sent."""
        log.error("step failed, the engine stops: %r", error)
        now = self._clock()
        for request in list(self._roster.live.values()):
            cause: InternalError | EngineDead
            if request.lease is not None:
                cause = InternalError("a step of the model failed")
            else:
                cause = EngineDead("the engine stopped because a step of the model failed")
            self._finisher.finish(request, "error", now, error=cause)
        # The flights stay: to free what they hold of a broken device can end the process there and then.
        self._outbox.flush(self._step)

    def close(self) -> None:
        """Ends the journal, if there is one. Worker and channels belong to whoever made them."""
        if self._recorder is not None:
            self._recorder.close()

    # --- what it knows about itself ---------------------------------------------------------------

    def _note(self, record: StepRecord) -> None:
        if record.step < 0:
            return
        self._steps.add(record)
        self._registry.add_each("host_seconds_total", record.stages)
        self._registry.observe_each("step_seconds", record.phases)

    def note_start(self, phases: dict[str, float]) -> None:
        """How long each phase of the start took, seconds."""
        for phase, seconds in phases.items():
            self._registry.put("startup_seconds", seconds, phase)

    def stats(self) -> dict[str, Any]:
        """A snapshot of all metrics, gauges set to this moment. See `Registry.snapshot`."""
        registry, store = self._registry, self._store
        reasons: Counter[str] = Counter()
        for reason, count in self._queue.reasons().items():
            reasons[reason.value] = count
        registry.put("requests_running", len(self._roster.active))
        registry.put_all("requests_waiting", dict(reasons))
        registry.put("waiting_tokens", self._queue.num_tokens)
        free, evictable = store.pages.num_free, store.cache.num_evictable
        used = store.pages.total - free - evictable
        registry.put("kv_usage_ratio", used / store.pages.total)
        registry.put("kv_tokens_used", used * store.page_size)
        registry.put("kv_tokens_evictable", evictable * store.page_size)
        registry.put("kv_tokens_free", free * store.page_size)
        return registry.snapshot()

    def profile(self) -> dict[str, Any]:
        """Where the time of the latest steps went. See `StepLog.summary`."""
        return self._steps.summary()

    def audit(self) -> list[str]:
        """Every rule that must hold between turns; one sentence for each that does not."""
        found = self._store.audit()
        roster, queue = self._roster, self._queue
        held = {id(request.lease) for request in roster.active}
        if held != {id(lease) for lease in self._store.leases.values()}:
            found.append("the leases are not those of the active requests")
        waiting = {request.uid for request in queue}
        active = {request.uid for request in roster.active}
        if waiting & active or waiting | active != set(roster.live):
            found.append("live requests are not exactly those that wait and those that are active")
        for request in queue:
            if request.refusal is None or request.lease is not None:
                found.append(f"request {request.uid} waits without a reason, or holds a lease")
        if queue.num_tokens != sum(request.prompt_len for request in queue.arrived):
            found.append("the queue's count of tokens is wrong")
        self._registry.add("audit_failures_total", len(found))
        return found
