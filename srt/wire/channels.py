"""How processes talk, without saying over what. `srt.wire.sockets` is zmq; `srt.wire.memory` is
in-process and carries the very same encoded frames, so that `--inline` proves the same thing.

No send ever blocks. Closing is idempotent; a receive after close raises `ChannelClosed`.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from srt.wire.messages import FrontReply, FrontRequest, Message

T = TypeVar("T")


class ChannelClosed(Exception):
    """The channel was closed on this side."""


class PeerGone(Exception):
    """The client's connection is gone: its requests must be aborted."""


class PeerSlow(Exception):
    """The client does not read and its high-water mark is reached."""


class Sender(Protocol):
    """The sending end of a PUSH - PULL hop."""

    def send(self, message: Message) -> None:
        """Never blocks; what the peer has not read yet is queued. Raises ChannelClosed."""
        ...

    def close(self) -> None:
        """What the peer has not got yet may be lost. Idempotent."""
        ...


class Receiver(Protocol[T]):
    """The receiving end in an asyncio process."""

    async def receive(self) -> list[T]:
        """Waits for at least one message and returns all that are there, in order."""
        ...

    def close(self) -> None:
        """Wakes whoever waits with ChannelClosed. Idempotent."""
        ...


class PollingReceiver(Protocol[T]):
    """The receiving end in the scheduler's plain loop."""

    def drain(self, timeout: float | None) -> list[T]:
        """All that is there. 0: do not wait; None: block until there is something; else seconds."""
        ...

    def close(self) -> None:
        """What was not drained is lost. Idempotent."""
        ...


class RouterEnd(Protocol):
    """The tokenizer's end of the front hop. A peer is an opaque identity."""

    async def receive(self) -> list[tuple[bytes, FrontRequest]]:
        """Like `Receiver.receive`. A frame that is not a message is answered with `Refused` (under
        its rid where that can be read, else "") and is not returned."""
        ...

    def send(self, peer: bytes, message: FrontReply) -> None:
        """Raises PeerGone or PeerSlow."""
        ...

    def close(self) -> None:
        """No peer gets anything any more. Idempotent."""
        ...


class DealerEnd(Protocol):
    """A client's end of the front hop."""

    def send(self, message: FrontRequest) -> None:
        """Never blocks. Raises ChannelClosed; PeerSlow if the engine does not read."""
        ...

    async def receive(self) -> list[FrontReply]:
        """Like `Receiver.receive`."""
        ...

    def close(self) -> None:
        """The engine takes it for the client's end and aborts its requests. Idempotent."""
        ...
