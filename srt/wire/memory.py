"""Channels inside one process. They carry the same encoded frames as the sockets do.

The two ends may live in one event loop, in two threads with a loop each, or one of them in plain
code. A plain `drain(None)` blocks its thread, so it must not be the thread of the other end's loop.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from typing import Generic, TypeVar

from srt.wire.channels import ChannelClosed, PeerGone, PeerSlow
from srt.wire.codec import Decoder, encode, front_replies, front_requests
from srt.wire.frames import messages_in, requests_in
from srt.wire.messages import FrontReply, FrontRequest, Message
from srt.wire.topology import HOPS

T = TypeVar("T")


class FrameQueue(Generic[T]):
    """A queue with one reader, which waits either in a coroutine or in a thread. `limit` 0: none."""

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._frames: deque[T] = deque()
        self._changed = threading.Condition()
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False

    def put(self, frame: T) -> bool:
        """False when the queue is full."""
        with self._changed:
            if self._limit and len(self._frames) >= self._limit:
                return False
            self._frames.append(frame)
            self._wake()
        return True

    def close(self) -> None:
        """Drops what is queued and wakes the reader."""
        with self._changed:
            self.is_closed = True
            self._frames.clear()
            self._wake()

    def take(self, timeout: float | None) -> list[T]:
        """All frames, for a thread; `timeout` as in `PollingReceiver.drain`. Raises ChannelClosed."""
        with self._changed:
            if timeout != 0:
                self._changed.wait_for(lambda: self._frames or self.is_closed, timeout)
            return self._empty()

    async def take_soon(self) -> list[T]:
        """All frames, at least one, for a coroutine. Raises ChannelClosed."""
        await asyncio.sleep(0)  # a busy sender must not keep the loop to itself
        while True:
            with self._changed:
                if self._frames or self.is_closed:
                    return self._empty()
                waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter

    def _empty(self) -> list[T]:
        if self.is_closed:
            raise ChannelClosed("this end was closed")
        frames = list(self._frames)
        self._frames.clear()
        return frames

    def _wake(self) -> None:
        self._changed.notify_all()
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.get_loop().is_closed():
            waiter.get_loop().call_soon_threadsafe(_settle, waiter)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class MemorySender:
    """A `Sender`. Its frames have no limit."""

    def __init__(self, frames: FrameQueue[bytes]) -> None:
        self._frames = frames
        self._is_closed = False

    def send(self, message: Message) -> None:
        if self._is_closed:
            raise ChannelClosed("this end was closed")
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        self._frames.put(frame)

    def close(self) -> None:
        self._is_closed = True


class MemoryReceiver(Generic[T]):
    """Both faces: `Receiver` for a loop, `PollingReceiver` for plain code."""

    def __init__(self, frames: FrameQueue[bytes], decoder: Decoder[T]) -> None:
        self._frames = frames
        self._decoder = decoder

    async def receive(self) -> list[T]:
        while True:
            messages = messages_in(await self._frames.take_soon(), self._decoder)
            if messages:
                return messages

    def drain(self, timeout: float | None) -> list[T]:
        return messages_in(self._frames.take(timeout), self._decoder)

    def close(self) -> None:
        self._frames.close()


def memory_pipe(decoder: Decoder[T]) -> tuple[MemorySender, MemoryReceiver[T]]:
    """Both ends of a PUSH - PULL hop; `decoder` is the hop's, from `srt.wire.codec`."""
    frames: FrameQueue[bytes] = FrameQueue()
    return MemorySender(frames), MemoryReceiver(frames, decoder)


class MemoryRouter:
    """The tokenizer's end; `connect` makes the ends of its clients."""

    def __init__(self, high_water_mark: int = HOPS["front"].high_water_mark) -> None:
        self._limit = high_water_mark
        self._inbox: FrameQueue[list[bytes]] = FrameQueue()
        self._peers: dict[bytes, FrameQueue[bytes]] = {}
        self._names = itertools.count(1)
        self._decoder = front_requests()

    def connect(self) -> MemoryDealer:
        """A new peer."""
        peer = next(self._names).to_bytes(5, "big")
        replies: FrameQueue[bytes] = FrameQueue(self._limit)
        self._peers[peer] = replies
        return MemoryDealer(peer, self._inbox, replies)

    async def receive(self) -> list[tuple[bytes, FrontRequest]]:
        while True:
            requests = requests_in(await self._inbox.take_soon(), self._decoder, self.send)
            if requests:
                return requests

    def send(self, peer: bytes, message: FrontReply) -> None:
        if self._inbox.is_closed:
            raise ChannelClosed("this end was closed")
        replies = self._peers.get(peer)
        if replies is None or replies.is_closed:
            self._peers.pop(peer, None)
            raise PeerGone(peer.hex())
        if not replies.put(encode(message)):
            raise PeerSlow(peer.hex())

    def close(self) -> None:
        self._inbox.close()


class MemoryDealer:
    """A `DealerEnd`, made by `MemoryRouter.connect`."""

    def __init__(
        self, peer: bytes, requests: FrameQueue[list[bytes]], replies: FrameQueue[bytes]
    ) -> None:
        self._peer = peer
        self._requests = requests
        self._replies = replies
        self._decoder = front_replies()

    def send(self, message: FrontRequest) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        if self._replies.is_closed:
            raise ChannelClosed("this end was closed")
        self._requests.put([self._peer, frame])

    async def receive(self) -> list[FrontReply]:
        while True:
            messages = messages_in(await self._replies.take_soon(), self._decoder)
            if messages:
                return messages

    def close(self) -> None:
        self._replies.close()
