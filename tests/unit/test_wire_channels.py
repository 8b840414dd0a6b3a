"""Both transports keep the same promises. Every case runs over memory, ipc and tcp."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import uvloop

from srt.errors import ConfigError
from srt.wire import codec
from srt.wire.channels import ChannelClosed, PeerGone, PeerSlow
from srt.wire.memory import MemoryRouter, memory_pipe
from srt.wire.messages import Abort, Drain, Hello, Ping, Refused, Turn
from srt.wire.params import Failure
from srt.wire.sockets import (
    ZmqDealer,
    ZmqPollingReceiver,
    ZmqReceiver,
    ZmqRouter,
    ZmqSender,
    close_context,
    open_context,
)
from srt.wire.topology import HOPS, Addresses

T = TypeVar("T")


class MemoryTransport:
    def pipe(self, polling: bool) -> tuple[Any, Any]:
        return memory_pipe(codec.work())

    def router(self, mark: int = 4096) -> Any:
        return MemoryRouter(mark)

    def dealer(self, router: Any) -> Any:
        return router.connect()


class ZmqTransport:
    """Remembers what it made, closes it, and bounds the end of its context."""

    def __init__(self, scheme: str, folder: Path) -> None:
        self._context = open_context()
        self._scheme = scheme
        self._folder = folder
        self._made: list[Any] = []

    def _endpoint(self) -> str:
        if self._scheme == "tcp":
            return "tcp://127.0.0.1:0"
        return f"ipc://{self._folder}/{len(self._made)}"

    def _keep(self, end: T) -> T:
        self._made.append(end)
        return end

    def pipe(self, polling: bool) -> tuple[Any, Any]:
        kind: Any = ZmqPollingReceiver if polling else ZmqReceiver
        receiver = self._keep(kind(self._context, self._endpoint(), HOPS["work"], codec.work()))
        sender = self._keep(ZmqSender(self._context, receiver.endpoint, HOPS["work"]))
        return sender, receiver

    def router(self, mark: int = 4096) -> Any:
        return self._keep(ZmqRouter(self._context, self._endpoint(), mark))

    def dealer(self, router: Any) -> Any:
        return self._keep(ZmqDealer(self._context, router.endpoint, 8))

    def close(self) -> None:
        for end in self._made:
            end.close()
        assert close_context(self._context, 10.0), "a socket was left open"
        assert list(self._folder.iterdir()) == [], "an ipc file was left behind"


@pytest.fixture(params=["memory", "ipc", "tcp"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "memory":
        yield MemoryTransport()
        return
    zmq_transport = ZmqTransport(request.param, tmp_path)
    yield zmq_transport
    zmq_transport.close()


async def soon(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, 20)


async def until_raises(kind: type[Exception], act: Callable[[], None], pause: float) -> None:
    while True:
        try:
            act()
        except kind:
            return
        await asyncio.sleep(pause)


async def until_sent(act: Callable[[], None]) -> None:
    while True:
        try:
            return act()
        except PeerSlow:
            await asyncio.sleep(0.01)


async def gather_turns(receiver: Any, count: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += [message.number for message in await soon(receiver.receive())]
    return numbers


async def test_order_is_kept_and_batches_arrive_whole(transport: Any) -> None:
    sender, receiver = transport.pipe(polling=False)
    waiting = asyncio.create_task(gather_turns(receiver, 3000))
    for number in range(3000):
        sender.send(Turn(number=number))
        if number % 500 == 0:
            await asyncio.sleep(0.001)
    assert await waiting == list(range(3000))
    sender.close()
    receiver.close()


async def test_a_flood_leaves_room_for_others(transport: Any) -> None:
    sender, receiver = transport.pipe(polling=False)
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(beat())
    for number in range(5000):
        sender.send(Turn(number=number))
        if number % 1000 == 999:
            await gather_turns(receiver, 1)
    assert beats >= 5
    beating.cancel()
    sender.close()
    receiver.close()


def test_draining(transport: Any) -> None:
    sender, receiver = transport.pipe(polling=True)
    assert receiver.drain(0) == []
    assert receiver.drain(0.01) == []
    sender.send(Drain(seconds=1.0))
    assert receiver.drain(None) == [Drain(seconds=1.0)]
    receiver.close()
    receiver.close()
    with pytest.raises(ChannelClosed):
        receiver.drain(0)
    sender.close()
    with pytest.raises(ChannelClosed):
        sender.send(Turn(number=1))


def test_a_blocked_drain_sleeps(transport: Any) -> None:
    sender, receiver = transport.pipe(polling=True)
    waker = threading.Timer(1.0, lambda: sender.send(Turn(number=1)))
    before = sum(psutil.Process().cpu_times()[:2])
    waker.start()
    assert receiver.drain(None) == [Turn(number=1)]
    assert sum(psutil.Process().cpu_times()[:2]) - before < 0.5, "it span instead of sleeping"
    waker.join()
    sender.close()
    receiver.close()


async def test_garbage_on_an_inner_hop_is_dropped(transport: Any) -> None:
    sender, receiver = transport.pipe(polling=False)
    sender.send_frame(b"\x01garbage")
    sender.send_frame(codec.encode(Ping(engine_age=1.0)))
    sender.send(Turn(number=7))
    assert await gather_turns(receiver, 1) == [7]
    sender.close()
    receiver.close()


async def test_requests_and_replies_find_their_peer(transport: Any) -> None:
    router = transport.router()
    dealers = [transport.dealer(router) for _ in range(3)]
    for number, dealer in enumerate(dealers):
        dealer.send(Hello(rid=str(number)))
    seen: dict[str, bytes] = {}
    while len(seen) < 3:
        seen |= {message.rid: peer for peer, message in await soon(router.receive())}
    for rid, peer in seen.items():
        router.send(peer, Ping(engine_age=float(rid)))
    for number, dealer in enumerate(dealers):
        assert await soon(dealer.receive()) == [Ping(engine_age=float(number))]
    for dealer in dealers:
        dealer.close()
    router.close()


async def test_garbage_from_a_client_is_refused_and_the_next_message_served(transport: Any) -> None:
    router = transport.router()
    dealer = transport.dealer(router)
    named = msgspec.msgpack.encode({"t": "generate", "rid": "x", "temprature": 1.0})
    for frame in (b"", b"GET / HTTP/1.1", b"\x02\x80", b"\x01" + named):
        dealer.send_frame(frame)
    dealer.send(Abort())
    requests = await soon(router.receive())
    assert [message for _, message in requests] == [Abort()]
    refusals: list[Refused] = []
    while len(refusals) < 4:
        refusals += await soon(dealer.receive())
    assert [refused.rid for refused in refusals] == ["", "", "", "x"]
    assert {refused.failure.code for refused in refusals} == {"protocol_error"}
    assert "temprature" in refusals[-1].failure.message
    dealer.close()
    router.close()


async def test_a_closed_client_is_gone(transport: Any) -> None:
    router = transport.router()
    dealer = transport.dealer(router)
    dealer.send(Hello(rid="1"))
    [(peer, _)] = await soon(router.receive())
    dealer.close()
    await soon(until_raises(PeerGone, lambda: router.send(peer, Ping(engine_age=0.0)), 0.01))
    with pytest.raises(PeerGone):
        router.send(b"nobody", Ping(engine_age=0.0))
    with pytest.raises(ChannelClosed):
        dealer.send(Abort())
    router.close()
    with pytest.raises(ChannelClosed):
        router.send(peer, Ping(engine_age=0.0))


async def test_a_client_that_does_not_read_is_slow_and_hurts_no_other(transport: Any) -> None:
    router = transport.router(mark=4)
    slow, quick = transport.dealer(router), transport.dealer(router)
    peers: dict[str, bytes] = {}
    slow.send(Hello(rid="slow"))
    quick.send(Hello(rid="quick"))
    while len(peers) < 2:
        peers |= {message.rid: peer for peer, message in await soon(router.receive())}
    big = Refused(rid="x" * 1_000_000, failure=Failure(code="internal", message=""))
    await soon(until_raises(PeerSlow, lambda: router.send(peers["slow"], big), 0))
    router.send(peers["quick"], Ping(engine_age=3.0))
    assert await soon(quick.receive()) == [Ping(engine_age=3.0)]
    assert (await soon(slow.receive()))[0] == big
    await soon(until_sent(lambda: router.send(peers["slow"], Ping(engine_age=4.0))))
    for end in (slow, quick, router):
        end.close()


async def test_closing_wakes_a_reader(transport: Any) -> None:
    router = transport.router()
    reading = asyncio.create_task(router.receive())
    await asyncio.sleep(0.01)
    router.close()
    with pytest.raises(ChannelClosed):
        await soon(reading)


def test_an_impossible_endpoint_names_itself(tmp_path: Path) -> None:
    context = open_context()
    with pytest.raises(ConfigError, match="front hop"):
        ZmqRouter(context, f"ipc://{tmp_path}/" + "x" * 200)
    assert close_context(context)


def test_closing_a_context_is_bounded(tmp_path: Path) -> None:
    context = open_context()
    receiver = ZmqPollingReceiver(
        context, Addresses.in_folder(str(tmp_path)).work, HOPS["work"], codec.work()
    )
    assert not close_context(context, 0.05)
    receiver.close()


def test_sockets_work_on_uvloop(tmp_path: Path) -> None:
    """Its readers differ from asyncio's; the asyncio processes run on it."""

    async def talk() -> None:
        context = open_context()
        router = ZmqRouter(context, f"ipc://{tmp_path}/front")
        dealer = ZmqDealer(context, router.endpoint)

        async def echo() -> None:
            while True:
                for peer, _ in await router.receive():
                    router.send(peer, Ping(engine_age=0.0))

        echoing = asyncio.create_task(echo())
        for _ in range(200):
            dealer.send(Abort())
            assert await soon(dealer.receive()) == [Ping(engine_age=0.0)]
        dealer.close()
        router.close()
        with pytest.raises(ChannelClosed):
            await soon(echoing)
        assert close_context(context)

    uvloop.run(talk())
    assert list(tmp_path.iterdir()) == []
