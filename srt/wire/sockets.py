"""Channels over zmq. Receivers and the router bind, senders and dealers connect, as the table in
`srt.wire.topology` says. Sockets are not thread-safe: one thread, and for the asyncio faces one
loop, uses a channel from its making to its close.

Nothing here waits for a peer. The inner hops close with linger 0; the front hop lingers a moment,
bounded, so that a last word (a terminal item, an abort) still leaves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import zmq

from srt.errors import ConfigError
from srt.wire.channels import ChannelClosed, PeerGone, PeerSlow
from srt.wire.codec import Decoder, encode, front_replies, front_requests
from srt.wire.frames import messages_in, requests_in
from srt.wire.guard import guard_socket, show_keys, watch_door
from srt.wire.keys import ClientKeys, ServerKeys
from srt.wire.messages import FrontReply, FrontRequest, Message
from srt.wire.topology import HOPS, Hop

T = TypeVar("T")
logger = logging.getLogger(__name__)

FRONT_LINGER_MS = 200
HEARTBEAT_MS = 2000  # tcp only: a peer that fell silent without closing is noticed after three
MAX_FRAME_BYTES = 64 * 1024 * 1024  # a client that sends more is disconnected by zmq
BATCH = 1024  # messages of one receive, so that a flood leaves room for the rest of the process
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def open_context(io_threads: int = 1) -> Context:
    """The process's one context. Its owner closes it with `close_context`."""
    return zmq.Context(io_threads)


def close_context(context: Context, seconds: float = 5.0) -> bool:
    """Ends the context and its ipc files. Waits at most `seconds`; False if a socket is still open."""
    ending = threading.Thread(target=context.term, name="zmq-term", daemon=True)
    ending.start()
    ending.join(seconds)
    if ending.is_alive():
        logger.warning("a socket is still open; the zmq context was left behind")
    return not ending.is_alive()


def _open(
    context: Context,
    kind: int,
    hop: Hop,
    endpoint: str,
    bind: bool,
    mark: int | None = None,
    keys: ClientKeys | None = None,
) -> Socket:
    socket = context.socket(kind)
    socket.linger = FRONT_LINGER_MS if hop.name == "front" else 0
    socket.set_hwm(hop.high_water_mark if mark is None else mark)
    if keys is not None:
        show_keys(socket, keys)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    if not bind:
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    _join(socket, hop, endpoint, bind)
    return socket


def _join(socket: Socket, hop: Hop, endpoint: str, bind: bool) -> None:
    if endpoint.startswith("tcp://"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 3 * HEARTBEAT_MS)
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        verb = "bind" if bind else "connect to"
        raise ConfigError(
            f"cannot {verb} {endpoint!r} for the {hop.name} hop: {error}; "
            "use ipc:///a/short/path (at most 107 characters) or tcp://address:port"
        ) from None


class Mouth:
    """The reading side of a socket in an event loop.

    zmq's descriptor tells of changes only, and any call on the socket may swallow one. So: read until
    nothing is left before waiting, and `look` again after every send on the same socket.
    """

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self, read: Callable[[], T]) -> list[T]:
        """What `read` gives until it raises zmq.Again; waits until that is something."""
        await asyncio.sleep(0)  # a busy sender must not keep the loop to itself
        while True:
            taken = _read_all(self._socket, read)
            if taken:
                return taken
            loop = asyncio.get_running_loop()
            if self._loop is None:
                self._loop = loop
                loop.add_reader(self._descriptor, self.look)
            waiter = self._waiter = loop.create_future()
            self.look()
            await waiter

    def look(self) -> None:
        # Asking for the events also quiets the descriptor, so it runs even if nobody waits.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._wake()

    def close(self) -> None:
        """Before the socket is. The reader that waits will find the socket closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
            self._loop = None
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _read_all(socket: Socket, read: Callable[[], T]) -> list[T]:
    if socket.closed:
        raise ChannelClosed("this end was closed")
    taken: list[T] = []
    try:
        while len(taken) < BATCH:
            taken.append(read())
    except zmq.Again:
        pass
    return taken


class ZmqSender:
    """PUSH. `hop` is the hop's name in the table."""

    def __init__(self, context: Context, endpoint: str, hop: Hop) -> None:
        self._socket = _open(context, zmq.PUSH, hop, endpoint, bind=False)

    def send(self, message: Message) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        if self._socket.closed:
            raise ChannelClosed("this end was closed")
        self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class ZmqReceiver(Generic[T]):
    """PULL in an asyncio process."""

    def __init__(self, context: Context, endpoint: str, hop: Hop, decoder: Decoder[T]) -> None:
        self._socket = _open(context, zmq.PULL, hop, endpoint, bind=True)
        self._mouth = Mouth(self._socket)
        self._decoder = decoder

    @property
    def endpoint(self) -> str:
        return _endpoint(self._socket)

    async def receive(self) -> list[T]:
        while True:
            frames = await self._mouth.take(lambda: self._socket.recv(zmq.NOBLOCK))
            messages = messages_in(frames, self._decoder)
            if messages:
                return messages

    def close(self) -> None:
        self._mouth.close()
        _unbind(self._socket)


class ZmqPollingReceiver(Generic[T]):
    """PULL in a plain loop. `drain(None)` sleeps in poll."""

    def __init__(self, context: Context, endpoint: str, hop: Hop, decoder: Decoder[T]) -> None:
        self._socket = _open(context, zmq.PULL, hop, endpoint, bind=True)
        self._decoder = decoder

    @property
    def endpoint(self) -> str:
        return _endpoint(self._socket)

    def drain(self, timeout: float | None) -> list[T]:
        frames = self._read()
        if not frames and timeout != 0:
            self._socket.poll(None if timeout is None else round(timeout * 1000))
            frames = self._read()
        return messages_in(frames, self._decoder)

    def close(self) -> None:
        _unbind(self._socket)

    def _read(self) -> list[bytes]:
        return _read_all(self._socket, lambda: self._socket.recv(zmq.NOBLOCK))


class ZmqRouter:
    """ROUTER, mandatory: a reply that reaches nobody is an error.

    It may be bound to a `public` endpoint too. With `keys` that one lets nobody in but the clients
    they allow, while `endpoint` stays as open as its folder is.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        high_water_mark: int | None = None,
        *,
        public: str | None = None,
        keys: ServerKeys | None = None,
    ) -> None:
        hop = HOPS["front"]
        self._socket = _open(context, zmq.ROUTER, hop, endpoint, bind=True, mark=high_water_mark)
        self._private = _endpoint(self._socket)
        if public is not None:
            if keys is not None:
                watch_door(context, keys)
                guard_socket(self._socket, keys)
            _join(self._socket, hop, public, bind=True)
        self._mouth = Mouth(self._socket)
        self._decoder = front_requests()

    @property
    def endpoint(self) -> str:
        return _endpoint(self._socket)

    async def receive(self) -> list[tuple[bytes, FrontRequest]]:
        while True:
            parcels = await self._mouth.take(lambda: self._socket.recv_multipart(zmq.NOBLOCK))
            requests = requests_in(parcels, self._decoder, self.send)
            if requests:
                return requests

    def send(self, peer: bytes, message: FrontReply) -> None:
        if self._socket.closed:
            raise ChannelClosed("this end was closed")
        try:
            self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            raise PeerSlow(peer.hex()) from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerGone(peer.hex()) from None
        finally:
            self._mouth.look()

    def close(self) -> None:
        self._mouth.close()
        _unbind(self._socket)
        _remove(self._private)


class ZmqDealer:
    """DEALER. `send` raises PeerSlow when the engine has read nothing for thousands of messages. `keys`
    are for a guarded front."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        high_water_mark: int | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        hop = HOPS["front"]
        self._socket = _open(context, zmq.DEALER, hop, endpoint, False, high_water_mark, keys)
        self._mouth = Mouth(self._socket)
        self._decoder = front_replies()

    def send(self, message: FrontRequest) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        if self._socket.closed:
            raise ChannelClosed("this end was closed")
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise PeerSlow("the engine does not read") from None
        finally:
            self._mouth.look()

    async def receive(self) -> list[FrontReply]:
        while True:
            frames = await self._mouth.take(lambda: self._socket.recv(zmq.NOBLOCK))
            messages = messages_in(frames, self._decoder)
            if messages:
                return messages

    def close(self) -> None:
        self._mouth.close()
        self._socket.close()


def _endpoint(socket: Socket) -> str:
    """Where it was bound last, with the port that a `:0` or `:*` became."""
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _unbind(socket: Socket) -> None:
    """Closes a bound socket and removes its ipc file, which zmq leaves behind. Idempotent."""
    if socket.closed:
        return
    endpoint = _endpoint(socket)
    socket.close()
    _remove(endpoint)


def _remove(endpoint: str) -> None:
    if endpoint.startswith("ipc://") and not endpoint.startswith("ipc://@"):
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
