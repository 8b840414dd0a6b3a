"""A recorded run of the scheduler, for `srt.scheduler.replay`.

The scheduler's only inputs are messages, clock readings, step results and what becomes of grammars.
`Recorder` writes them as they pass, one length-prefixed msgpack record each, with a hash of every batch
launched; `replay` feeds them to a new scheduler and compares the hashes. Equal hashes: the same steps,
slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from srt.errors import TandemError
from srt.protocols.forward_batch import ForwardBatch, StepResult
from srt.protocols.grammar import Grammars, Opened
from srt.protocols.worker import Idler, Ticket, Worker, WorkerFacts
from srt.scheduler.budget import Settings
from srt.wire.convert import to_failure
from srt.wire.messages import WorkMessage
from srt.wire.params import Failure, Grammar


class Head(msgspec.Struct, tag="head"):
    facts: WorkerFacts
    settings: Settings


class Messages(msgspec.Struct, tag="turn"):
    """A turn begins, with these."""

    messages: list[WorkMessage]


class Reading(msgspec.Struct, tag="clock"):
    seconds: float


class Launch(msgspec.Struct, tag="launch"):
    digest: bytes


class Result(msgspec.Struct, tag="result"):
    result: StepResult | None  # None: the step raised


class GrammarsReady(msgspec.Struct, tag="grammars"):
    """Which requests got a matcher; a failure where there is none."""

    uids: list[int]
    failures: dict[int, Failure]


class Followed(msgspec.Struct, tag="followed"):
    """What a matcher said of new tokens: complete, or failed, or neither."""

    is_complete: bool
    failure: Failure | None = None


Record = Head | Messages | Reading | Launch | Result | GrammarsReady | Followed


def digest(batch: ForwardBatch) -> bytes:
    """Eight bytes that stand for everything in a batch but the masks of grammars: these follow from
    the tokens, and a replay has no vocabulary to make them from."""
    if any(piece.allowed is not None for piece in batch.slices):
        plain = [replace(piece, allowed=None, look_ahead=None) for piece in batch.slices]
        batch = replace(batch, slices=plain)
    return blake2b(msgspec.msgpack.encode(batch), digest_size=8).digest()


class _RecordedTicket:
    def __init__(self, ticket: Ticket, write: Callable[[Record], None]) -> None:
        self._ticket = ticket
        self._write = write

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> StepResult:
        try:
            result = self._ticket.wait()
        except Exception:
            self._write(Result(result=None))
            raise
        self._write(Result(result=result))
        return result


class _RecordedGrammars:
    def __init__(self, grammars: Grammars, write: Callable[[Record], None]) -> None:
        self._grammars = grammars
        self._write = write

    def open(self, uid: int, grammar: Grammar) -> None:
        self._grammars.open(uid, grammar)

    def ready(self, seconds: float) -> list[Opened]:
        found = self._grammars.ready(seconds)
        failures = {o.uid: to_failure(o.error) for o in found if o.error is not None}
        self._write(GrammarsReady(uids=[opened.uid for opened in found], failures=failures))
        return found

    def follow(self, uid: int, tokens: list[int]) -> bytes | None:
        try:
            mask = self._grammars.follow(uid, tokens)
        except TandemError as error:
            self._write(Followed(is_complete=False, failure=to_failure(error)))
            raise
        self._write(Followed(is_complete=mask is None))
        return mask

    def peek(self, uid: int, tokens: list[int]) -> bytes | None:
        """The worker's question, whose answer comes with the step's result."""
        return self._grammars.peek(uid, tokens)

    def forget(self, uid: int) -> None:
        self._grammars.forget(uid)


class Recorder:
    """Stands between the scheduler and its world: it is the worker and the clock that the scheduler is
    built with, and hears of each turn first. `srt.scheduler.build` puts it there."""

    def __init__(
        self, path: Path, worker: Worker, settings: Settings, clock: Callable[[], float]
    ) -> None:
        self._file: BinaryIO = path.open("wb")
        self._encoder = msgspec.msgpack.Encoder()
        self._worker = worker
        self._clock = clock
        self._write(Head(facts=worker.facts, settings=settings))

    @property
    def facts(self) -> WorkerFacts:
        return self._worker.facts

    def launch(self, batch: ForwardBatch) -> Ticket:
        self._write(Launch(digest=digest(batch)))
        return _RecordedTicket(self._worker.launch(batch), self._write)

    def idle(self) -> bool:
        """Not recorded: no step depends on it."""
        return isinstance(self._worker, Idler) and self._worker.idle()

    def clock(self) -> float:
        seconds = self._clock()
        self._write(Reading(seconds=seconds))
        return seconds

    def record_grammars(self, grammars: Grammars) -> Grammars:
        return _RecordedGrammars(grammars, self._write)

    def begin_turn(self, messages: Sequence[WorkMessage]) -> None:
        self._write(Messages(messages=list(messages)))
        self._file.flush()

    def close(self) -> None:
        """Ends the journal. The worker belongs to whoever made it."""
        self._file.close()

    def _write(self, record: Record) -> None:
        frame = self._encoder.encode(record)
        self._file.write(len(frame).to_bytes(4, "little") + frame)
