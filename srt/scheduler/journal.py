"""A recorded run of the scheduler, and its replay in one process without a model.

The scheduler's only inputs are messages, clock readings and step results. `Recorder` writes them as
they pass, one length-prefixed msgpack record each, with a hash of every batch launched; `replay` feeds
them to a new scheduler and compares the hashes. Equal hashes: the same steps, slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec

from srt.protocols.forward_batch import ForwardBatch, StepResult
from srt.protocols.worker import Ticket, Worker, WorkerFacts
from srt.scheduler.budget import Settings
from srt.scheduler.build import build_scheduler
from srt.wire.messages import Message, WorkMessage


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


Record = Head | Messages | Reading | Launch | Result


def digest(batch: ForwardBatch) -> bytes:
    """Eight bytes that stand for everything in a batch."""
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


class Recorder:
    """Stands between the scheduler and its world: it is the worker and the clock that the scheduler is
    built with; call `turn` with each turn's messages before handing them over."""

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

    def clock(self) -> float:
        seconds = self._clock()
        self._write(Reading(seconds=seconds))
        return seconds

    def turn(self, messages: list[WorkMessage]) -> None:
        self._write(Messages(messages=messages))
        self._file.flush()

    def close(self) -> None:
        self._worker.close()
        self._file.close()

    def _write(self, record: Record) -> None:
        frame = self._encoder.encode(record)
        self._file.write(len(frame).to_bytes(4, "little") + frame)


class Diverged(Exception):
    """The replay asked for something else than what was recorded there."""


class _Tape:
    """A journal as the worker and the clock of a scheduler."""

    def __init__(self, path: Path) -> None:
        self._records = _read(path)
        self.num_steps = 0
        head = next(self._records, None)
        if not isinstance(head, Head):
            raise ValueError(f"{path} is not a journal of the scheduler")
        self.head = head

    @property
    def facts(self) -> WorkerFacts:
        return self.head.facts

    def next_turn(self) -> list[WorkMessage] | None:
        record = next(self._records, None)
        if record is None:
            return None
        if not isinstance(record, Messages):
            raise Diverged(f"a turn is over where the journal has {type(record).__name__}")
        return record.messages

    def clock(self) -> float:
        record = next(self._records, None)
        if not isinstance(record, Reading):
            raise Diverged(f"the clock is read where the journal has {type(record).__name__}")
        return record.seconds

    def launch(self, batch: ForwardBatch) -> _Tape:
        record = next(self._records, None)
        if not isinstance(record, Launch):
            raise Diverged(f"a step is launched where the journal has {type(record).__name__}")
        if record.digest != digest(batch):
            raise Diverged(f"step {batch.step} is another one than what was recorded")
        self.num_steps += 1
        return self

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        record = next(self._records, None)
        if not isinstance(record, Result):
            raise Diverged(f"a step is awaited where the journal has {type(record).__name__}")
        if record.result is None:
            raise RuntimeError("this step raised when it was recorded")
        return record.result

    def close(self) -> None:
        self._records.close()


def _read(path: Path) -> Generator[Record, None, None]:
    decoder = msgspec.msgpack.Decoder(Record)
    with path.open("rb") as file:
        while len(size := file.read(4)) == 4:
            frame = file.read(int.from_bytes(size, "little"))
            if len(frame) < int.from_bytes(size, "little"):
                return  # the process died while it wrote
            yield decoder.decode(frame)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """`difference` None: every step was the same."""

    num_turns: int
    num_steps: int
    difference: str | None


class _Collector:
    """An outbox that keeps what it is sent."""

    def __init__(self, keep: Callable[[Message], None]) -> None:
        self._keep = keep

    def send(self, message: Message) -> None:
        self._keep(message)

    def close(self) -> None:
        """There is nothing to close."""


def replay(path: Path, keep: Callable[[Message], None] = lambda message: None) -> Replay:
    """Runs a journal again; `keep` sees every message the scheduler sends. Raises ValueError if the
    file is no journal."""
    tape = _Tape(path)
    scheduler = build_scheduler(tape, tape.head.settings, _Collector(keep), tape.clock)
    num_turns = 0
    difference = None
    try:
        while (messages := tape.next_turn()) is not None:
            scheduler.turn(messages)
            num_turns += 1
    except Diverged as error:
        difference = f"turn {num_turns}: {error}"
    except RuntimeError as error:
        difference = None if "when it was recorded" in str(error) else f"turn {num_turns}: {error}"
    finally:
        tape.close()
    return Replay(num_turns=num_turns, num_steps=tape.num_steps, difference=difference)
