"""Rank 0 tells the others every step and every chore; they do them in that order, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from srt.errors import InternalError
from srt.parallel.group import Alone
from srt.protocols.forward_batch import ForwardBatch, RowSetup, Slice, StepResult, TableWrite
from srt.protocols.worker import WorkerFacts
from srt.runner.ranks import LeadingWorker, Order, OrderDecoder, follow
from srt.wire.params import SamplingParams


class Wire:
    """What `ZmqSender` is for: frames that were sent."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send_frame(self, frame: bytes) -> None:
        self.frames.append(frame)


class Inbox:
    """One receive after the other; then `stop` is true."""

    def __init__(self, receives: list[list[Order]]) -> None:
        self.receives = receives
        self.timeouts: list[float | None] = []

    def drain(self, timeout: float | None) -> list[Order]:
        self.timeouts.append(timeout)
        return self.receives.pop(0)

    def stop(self) -> bool:
        return not self.receives

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Flight:
    """A step that ends when it is asked for the `patience`-th time."""

    patience: int = 0
    error: Exception | None = None

    def done(self) -> bool:
        self.patience -= 1
        return self.patience < 0

    def wait(self) -> StepResult:
        if self.error is not None:
            raise self.error
        return StepResult(slices=[])


@dataclass
class Worker:
    """Notes what it is asked to do."""

    chores: int = 0
    patience: int = 0
    error: Exception | None = None
    last_words: Exception | None = None
    done: list[str] = field(default_factory=list)
    batches: list[ForwardBatch] = field(default_factory=list)

    @property
    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            vocab_size=8, context_length=8, num_pages=2, page_size=4, max_rows=1, end_token_ids=[1],
            memory_bytes={},
        )  # fmt: skip

    def launch(self, batch: ForwardBatch) -> Flight:
        self.batches.append(batch)
        self.done.append(f"step {batch.step}")
        return Flight(self.patience, self.error)

    def idle(self) -> bool:
        self.chores -= 1
        self.done.append("chore")
        return self.chores > 0

    def close(self) -> None:
        self.done.append("close")
        if self.last_words is not None:
            raise self.last_words


class Shared(Alone):
    """A group of two of which only this rank runs: keeps what rank 0 shared, in order."""

    size = 2

    def __init__(self, told: list[bytes | None] | None = None) -> None:
        self.told = told or []
        self.said: list[bytes | None] = []
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def share(self, data: bytes | None) -> bytes | None:
        self.said.append(data)
        return self.told.pop(0) if self.told else data


def batch(step: int, look: Callable[[list[int]], bytes | None] | None = None) -> ForwardBatch:
    return ForwardBatch(
        step=step,
        setups=[
            RowSetup(
                row=0, params=SamplingParams(seed=3, logit_bias={5: -1.0}), tokens=[1, 2],
                prompt_len=2, stop_ids=[1],
            )
        ],
        table_writes=[TableWrite(row=0, first=0, pages=[1])],
        slices=[
            Slice(row=0, start=2, length=1, tokens=None, sample=True, draft=2,
                  allowed=None if look is None else b"\x0f", look_ahead=look),
            Slice(row=1, start=0, length=2, tokens=[4, 5], sample=True),
        ],
    )  # fmt: skip


def sent(wire: Wire) -> list[Order]:
    decoder = OrderDecoder()
    return [decoder.decode(frame) for frame in wire.frames]


def test_every_rank_gets_what_rank_0_launches() -> None:
    wires, own = [Wire(), Wire()], Worker(chores=2)
    leader = LeadingWorker(own, wires, Shared())
    ticket = leader.launch(batch(1))
    assert ticket.wait().slices == [] and leader.facts == own.facts
    assert leader.idle() and not leader.idle() and not leader.idle()
    leader.launch(batch(2))
    assert not leader.idle()  # asked once more: the step may have left some
    leader.close()
    assert own.done == ["step 1", "chore", "chore", "step 2", "chore", "close"]
    for wire in wires:
        assert sent(wire) == [batch(1), None, None, batch(2), None]
    assert own.batches == [batch(1), batch(2)]


def test_the_others_do_it_in_that_order() -> None:
    worker = Worker(patience=1)
    inbox = Inbox([[], [batch(1), batch(2)], [None], [], [batch(3)], []])
    follow(worker, inbox, Shared(), inbox.stop)
    assert worker.done == ["step 1", "step 2", "chore", "step 3"]
    idle, busy = inbox.timeouts[0], inbox.timeouts[2]
    assert idle is not None and busy is not None and busy < idle
    assert inbox.timeouts == [idle, idle, busy, idle, idle, busy]


def test_a_step_that_fails_ends_a_rank() -> None:
    inbox = Inbox([[batch(1)], []])
    with pytest.raises(RuntimeError, match="out of memory"):
        follow(Worker(error=RuntimeError("out of memory")), inbox, Shared(), inbox.stop)


def test_a_rank_whose_device_broke_leaves_the_group_too() -> None:
    group = Shared()
    leader = LeadingWorker(Worker(last_words=RuntimeError("an illegal access")), [], group)
    with pytest.raises(RuntimeError, match="illegal"):
        leader.close()
    assert not group.is_open


def test_what_a_grammar_allows_is_asked_of_rank_0_only() -> None:
    """The question itself does not travel; its answer does, to all ranks at the same place."""
    answers = {(7,): b"\x01", (7, 7): None}
    wire, own, group = Wire(), Worker(), Shared()
    LeadingWorker(own, [wire], group).launch(batch(1, lambda tokens: answers[tuple(tokens)]))
    asked = own.batches[0].slices[0].look_ahead
    assert asked is not None and own.batches[0].slices[1].look_ahead is None
    assert [asked([7]), asked([7, 7])] == [b"\x01", None] == group.said
    [order] = sent(wire)
    assert order is not None and order.slices[0].allowed == b"\x0f"
    assert order.slices[0].look_ahead is None
    follower = Worker()
    inbox = Inbox([[order], []])
    follow(follower, inbox, Shared(told=[b"\x01", None]), inbox.stop)
    told = follower.batches[0].slices[0].look_ahead
    assert told is not None and follower.batches[0].slices[1].look_ahead is None
    assert [told([7]), told([7, 7])] == [b"\x01", None]


@pytest.mark.parametrize("frame", [b"\x00", b"", b"\x01\xc1", b"\x01\x81\xa4step\x01"])
def test_a_frame_that_is_no_order_is_an_error(frame: bytes) -> None:
    """Left out, the other ranks would wait for this one forever."""
    with pytest.raises(InternalError, match="cannot be read"):
        OrderDecoder().decode(frame)
