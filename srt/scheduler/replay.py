"""A journal, run again in one process without a model.

The journal's messages, clock readings and step results go to a new scheduler, and every batch it
launches is compared with the recorded hash. Equal hashes: the same steps, slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from srt.protocols.forward_batch import ForwardBatch, StepResult
from srt.protocols.grammar import Opened
from srt.protocols.worker import WorkerFacts
from srt.scheduler.build import build_scheduler
from srt.scheduler.journal import (
    Followed,
    GrammarsReady,
    Head,
    Launch,
    Messages,
    Reading,
    Record,
    Result,
    digest,
)
from srt.wire.convert import from_failure
from srt.wire.messages import Message, WorkMessage
from srt.wire.params import Grammar


class Diverged(Exception):
    """The replay asked for something else than what was recorded there."""


class _Tape:
    """A journal as the worker, the clock and the grammars of a scheduler."""

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
            raise Diverged(f"a turn is over where the journal has {_name(record)}")
        return record.messages

    def clock(self) -> float:
        record = next(self._records, None)
        if not isinstance(record, Reading):
            raise Diverged(f"the clock is read where the journal has {_name(record)}")
        return record.seconds

    def launch(self, batch: ForwardBatch) -> _Tape:
        record = next(self._records, None)
        if not isinstance(record, Launch):
            raise Diverged(f"a step is launched where the journal has {_name(record)}")
        if record.digest != digest(batch):
            raise Diverged(f"step {batch.step} is another one than what was recorded")
        self.num_steps += 1
        return self

    def open(self, uid: int, grammar: Grammar) -> None:
        """Nothing: what became of it is on the tape."""

    def ready(self, seconds: float) -> list[Opened]:
        record = next(self._records, None)
        if not isinstance(record, GrammarsReady):
            raise Diverged(f"grammars are awaited where the journal has {_name(record)}")
        found = []
        for uid in record.uids:
            failure = record.failures.get(uid)
            error = None if failure is None else from_failure(failure)
            found.append(Opened(uid=uid, error=error))
        return found

    def follow(self, uid: int, tokens: list[int]) -> bytes | None:
        record = next(self._records, None)
        if not isinstance(record, Followed):
            raise Diverged(f"a grammar is followed where the journal has {_name(record)}")
        if record.failure is not None:
            raise from_failure(record.failure)
        return None if record.is_complete else b""

    def peek(self, uid: int, tokens: list[int]) -> bytes | None:
        raise AssertionError("a replay has no worker that would ask")

    def forget(self, uid: int) -> None:
        """Nothing is kept."""

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        record = next(self._records, None)
        if not isinstance(record, Result):
            raise Diverged(f"a step is awaited where the journal has {_name(record)}")
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
    scheduler = build_scheduler(
        tape, tape.head.settings, _Collector(keep), tape.clock, grammars=tape
    )
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


def _name(record: Record | None) -> str:
    return "its end: it was cut off" if record is None else type(record).__name__
