"""The scheduler over a worker in this process, without sockets: requests in, everything they are told
out. What one turn brings and sends goes by way of the wire's codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from srt.protocols.forward_batch import ForwardBatch
from srt.protocols.grammar import Grammars
from srt.protocols.worker import Ticket, Worker, WorkerFacts
from srt.scheduler.budget import Settings
from srt.scheduler.build import build_store
from srt.scheduler.loop import Scheduler
from srt.wire.codec import encode, step
from srt.wire.messages import Message, TokenItem, Tokens, Work
from srt.wire.params import Finish, TokenLogprobs
from tokenizer_proc.text_stream import TextStream, TokenBytes

TURNS = 100_000  # far more than any run needs
TICK = 0.001  # seconds that pass with each reading of the clock


@dataclass(slots=True)
class Outcome:
    """Everything a request was told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # of text, as they were sent
    finish: Finish | None = None

    @property
    def end(self) -> Finish:
        assert self.finish is not None, "a request has no end"
        return self.finish

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def take(self, item: TokenItem) -> None:
        assert self.finish is None, "a request goes on after its end"
        self.tokens += item.tokens
        self.logprobs += item.logprobs or []
        if item.prompt_logprobs is not None:
            assert not self.prompt_logprobs, "prompt logprobs come once"
            self.prompt_logprobs = item.prompt_logprobs
        self.finish = item.finish


Outcomes = dict[int, Outcome]  # by uid


class Watched:
    """A worker, and what it was asked to do."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.num_steps = 0
        self.num_shared = 0  # steps of more than one request
        self.num_cuts = 0  # places where a prompt was cut

    @property
    def facts(self) -> WorkerFacts:
        return self._worker.facts

    def launch(self, batch: ForwardBatch) -> Ticket:
        self.num_steps += 1
        self.num_shared += len(batch.slices) > 1
        self.num_cuts += sum(s.tokens is not None and not s.sample for s in batch.slices)
        return self._worker.launch(batch)

    def close(self) -> None:
        """The worker stays its maker's."""


class Driver:
    """`run` answers requests; what is cached stays for the next `run`. The worker stays its maker's.
    With a `vocabulary` outcomes have text. The clock is not the machine's: no run depends on it."""

    def __init__(
        self,
        worker: Worker,
        settings: Settings,
        *,
        grammars: Grammars | None = None,
        vocabulary: TokenBytes | None = None,
    ) -> None:
        self.worker = worker
        self.outcomes: Outcomes = {}
        self.started: list[int] = []  # uids in order of their first token
        self._now = 0.0
        self._decoder = step()
        self._vocabulary = vocabulary
        self._streams: dict[int, TextStream] = {}
        self.watched = Watched(worker)
        self.store = build_store(worker.facts, settings)
        self.scheduler = Scheduler(
            worker=self.watched,
            store=self.store,
            outbox=self,
            settings=settings,
            clock=self._clock,
            grammars=grammars,
        )

    def run(self, *waves: Sequence[Work]) -> Outcomes:
        """Each wave arrives two turns after the one before; the outcomes of all of them. Raises
        AssertionError where a rule of the engine is broken."""
        for wave in waves:
            self.scheduler.turn(list(wave))
            self.scheduler.turn([])
        turns = 0
        while self.scheduler.turn([]):
            turns += 1
            assert turns < TURNS, "the scheduler does not come to an end"
        violations = self.scheduler.audit()
        assert not violations, "; ".join(violations)
        return {work.uid: self.outcomes[work.uid] for wave in waves for work in wave}

    def send(self, message: Message) -> None:
        """The outbox: what the scheduler puts out."""
        message = self._decoder.decode(encode(message))
        if not isinstance(message, Tokens):
            return
        for item in message.all_items():
            outcome = self.outcomes.setdefault(item.uid, Outcome())
            if item.tokens and not outcome.tokens:
                self.started.append(item.uid)
            outcome.take(item)
            if self._vocabulary is not None:
                self._add_text(item, outcome, self._vocabulary)

    def _add_text(self, item: TokenItem, outcome: Outcome, vocabulary: TokenBytes) -> None:
        if item.opened is not None:
            self._streams[item.uid] = TextStream(item.opened, vocabulary, None)
        stream = self._streams.get(item.uid)
        made = None if stream is None else stream.take(item)
        if made is not None and made.text:
            outcome.pieces.append(made.text)

    def close(self) -> None:
        """Part of being an outbox; nothing is held."""

    def _clock(self) -> float:
        self._now += TICK
        return self._now
