"""Several processes compute one model: rank 0 decides, the others follow.

There is one scheduler, rank 0's. Each batch that it launches goes to the other ranks as it is, before
rank 0 computes it, so all of them compute the same steps in the same order. Nothing that could differ
between processes (time, the order of messages, when a grammar is ready, a seed) is ever asked for
anywhere else. All ranks have the same logits and draw the same tokens from them, so a decode slice's
token, which the scheduler may not know yet, need not be sent either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from srt.errors import InternalError, ProtocolError
from srt.parallel.group import Group
from srt.protocols.forward_batch import ForwardBatch, LookAhead, Slice
from srt.protocols.worker import Idler, Ticket, Worker, WorkerFacts
from srt.wire.channels import PollingReceiver
from srt.wire.codec import VERSION_BYTE, Decoder
from srt.wire.sockets import ZmqSender

IDLE_SECONDS = 1.0  # how often a rank without work looks whether to stop
BUSY_SECONDS = 0.002  # how often one that computes looks whether a step failed

Order = ForwardBatch | None  # None: a chore


class OrderDecoder(Decoder[Order]):
    """Of the order hop. A frame that is no order is an error here, never left out: the ranks that got
    the step would wait for this one."""

    def __init__(self) -> None:
        super().__init__(Order)

    def decode(self, frame: bytes) -> Order:
        try:
            return super().decode(frame)
        except ProtocolError as error:
            raise InternalError(f"an order of rank 0 cannot be read: {error}") from error


class LeadingWorker:
    """Rank 0's worker: others do what it does."""

    def __init__(self, worker: Worker, others: Sequence[ZmqSender], group: Group) -> None:
        self._worker = worker
        self._others = others
        self._group = group
        self._encoder = msgspec.msgpack.Encoder()
        self._has_chores = True

    @property
    def facts(self) -> WorkerFacts:
        return self._worker.facts

    def launch(self, batch: ForwardBatch) -> Ticket:
        self._has_chores = True
        if any(piece.look_ahead is not None for piece in batch.slices):
            slices = [replace(piece, look_ahead=None) for piece in batch.slices]
            self._send(replace(batch, slices=slices))
            batch = replace(batch, slices=[self._sharing(piece) for piece in batch.slices])
        else:
            self._send(batch)
        return self._worker.launch(batch)

    def idle(self) -> bool:
        """A chore may need all ranks, so all of them do it."""
        if self._has_chores and isinstance(self._worker, Idler):
            self._send(None)
            self._has_chores = self._worker.idle()
            return self._has_chores
        return False

    def close(self) -> None:
        try:
            self._worker.close()
        finally:
            self._group.close()

    def _send(self, order: Order) -> None:
        frame = VERSION_BYTE + self._encoder.encode(order)
        for other in self._others:
            other.send_frame(frame)

    def _sharing(self, piece: Slice) -> Slice:
        if piece.look_ahead is None:
            return piece
        return replace(piece, look_ahead=partial(_look_and_tell, self._group, piece.look_ahead))


def _look_and_tell(group: Group, look: LookAhead, tokens: list[int]) -> bytes | None:
    return group.share(look(tokens))


def _be_told(group: Group, tokens: list[int]) -> bytes | None:
    return group.share(None)


def follow(
    worker: Worker, orders: PollingReceiver[Order], group: Group, stop: Callable[[], bool]
) -> None:
    """What a rank beside 0 does until `stop`: launches what it is sent, as it comes. What its steps give
    nobody asks for; what they raise it raises. Without orders it sleeps in the socket."""
    flights: deque[Ticket] = deque()
    while not stop():
        for order in orders.drain(BUSY_SECONDS if flights else IDLE_SECONDS):
            if order is not None:
                flights.append(worker.launch(_told(order, group)))
            elif isinstance(worker, Idler):
                while flights:
                    flights.popleft().wait()
                worker.idle()
        while flights and flights[0].done():
            flights.popleft().wait()


def _told(batch: ForwardBatch, group: Group) -> ForwardBatch:
    """What may follow a guess under a grammar is known to rank 0 only."""
    for piece in batch.slices:
        if piece.allowed is not None:
            piece.look_ahead = partial(_be_told, group)
    return batch
