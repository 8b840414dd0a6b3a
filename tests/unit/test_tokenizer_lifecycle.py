"""Who dies, who stalls, who does not read: every sample still has exactly one end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from service_rig import Rig, make_rig, until

from srt import errors
from srt.wire.memory import MemoryDealer
from srt.wire.messages import Abort, Generate, Outputs, Ping, Refused
from srt.wire.params import SamplingParams
from tokenizer_proc.ring import Ring


async def test_a_client_that_dies_is_an_abort() -> None:
    async with make_rig() as rig:
        rig.engine.auto = None
        dying, living = rig.router.connect(), rig.router.connect()
        dying.send(Generate(rid="a", prompt="x", n=2))
        living.send(Generate(rid="a", prompt="x"))
        await until(lambda: len(rig.engine.open) == 3)
        dying.close()
        await until(lambda: len(rig.engine.open) == 1)
        assert not any(abort.quiet for abort in rig.engine.aborts()), "the detokenizer must hear it"
        await until(lambda: rig.service.late_items == 2)
        assert [work.n for work in rig.service._requests] == [1]


async def test_pings_go_to_clients_with_open_requests_only() -> None:
    async with make_rig() as rig:
        rig.engine.auto = None
        busy, idle = rig.router.connect(), rig.router.connect()
        busy.send(Generate(rid="a", prompt="x"))
        [ping, *_] = await busy.receive()
        assert isinstance(ping, Ping)
        idle.send(Abort())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(idle.receive(), 0.05)


async def test_a_client_that_does_not_read_is_cut_and_told_so_when_it_reads() -> None:
    async with make_rig(mark=3) as rig:
        rig.engine.auto = None
        slow, quick = rig.router.connect(), rig.router.connect()
        slow.send(Generate(rid="s", prompt="x"))
        quick.send(Generate(rid="q", prompt="x"))
        await until(lambda: len(rig.engine.open) == 2)
        while len(rig.engine.open) == 2:  # the pings fill the slow one's mark
            await quick.receive()
        ends = await ends_of(slow, 1)
        assert ends == Counter({("s", 0, "abort"): 1})
        rig.engine.say(*(rig.engine.end(uid, "stop", "fine") for uid in list(rig.engine.open)))
        assert await ends_of(quick, 1) == Counter({("q", 0, "stop"): 1})


async def ends_of(peer: MemoryDealer, count: int) -> Counter[tuple[str, int, str]]:
    """(rid, index, reason) of ends, and (rid, -1, code) of refusals."""
    ends: Counter[tuple[str, int, str]] = Counter()
    while ends.total() < count:
        for message in await asyncio.wait_for(peer.receive(), 20):
            if isinstance(message, Refused):
                ends[message.rid, -1, message.failure.code] += 1
            elif isinstance(message, Outputs):
                for item in message.items:
                    if item.finish is not None:
                        ends[item.rid, item.index, item.finish.reason] += 1
    return ends


async def test_a_stalled_ring_ends_everything_once_and_recovers() -> None:
    async with make_rig(stall_seconds=0.1) as rig, await rig.client() as client:
        rig.engine.auto = None
        peer = rig.router.connect()
        peer.send(Generate(rid="a", prompt="x", n=2))
        pending = asyncio.create_task(client.generate("y"))
        await until(lambda: len(rig.engine.open) == 3)
        rig.engine.turns = False
        with pytest.raises(errors.EngineDead):
            await pending
        assert await ends_of(peer, 2) == Counter({("a", 0, "error"): 1, ("a", 1, "error"): 1})
        assert (await client.health())["phase"] == "stalled"
        with pytest.raises(errors.EngineDead):
            await client.generate("z")
        with pytest.raises(errors.EngineDead):
            await client.metrics()
        assert len(rig.engine.works()) == 3
        rig.engine.turns = True
        await until(lambda: rig.service.phase == "ready")
        assert rig.engine.open == {}
        rig.engine.auto = ["a", "b"]
        assert (await client.generate("z")).text == "ab"


async def test_a_death_that_is_told_ends_everything_at_once_and_for_good() -> None:
    async with make_rig() as rig, await rig.client() as client:
        rig.engine.auto = None
        pending = asyncio.create_task(client.generate("y", n=2))
        await until(lambda: len(rig.engine.open) == 2)
        rig.service.declare_dead("scheduler")
        for request in (pending, client.generate("z"), client.metrics()):
            with pytest.raises(errors.EngineDead, match="scheduler process died"):
                await request
        health = await client.health()
        assert health["phase"] == "stalled" and "scheduler process died" in health["cause"]


def test_the_ring_does_not_count_the_time_it_slept_itself() -> None:
    ring = Ring(stall_seconds=5.0, tick=0.5, now=0.0)
    turn = ring.beat(0.0)
    assert turn is not None
    assert ring.beat(1.0) is None, "one at a time"
    ring.beat(1000.0)
    assert ring.age == 2.0
    ring.returned(turn)
    assert (ring.age, ring.has_turned) == (0.0, True)
    for tick in range(1, 20):
        ring.beat(1000.0 + tick / 2)
    assert ring.is_stalled


async def test_draining_lets_requests_end_and_refuses_new_ones() -> None:
    async with make_rig(drain_seconds=20.0) as rig:
        rig.engine.auto = None
        peer = rig.router.connect()
        peer.send(Generate(rid="old", prompt="x"))
        await until(lambda: rig.engine.open)
        rig.stop.set()
        await until(rig.engine.drains)
        assert rig.service.phase == "draining"
        peer.send(Generate(rid="new", prompt="x"))
        assert await ends_of(peer, 1) == Counter({("new", -1, "shutting_down"): 1})
        [uid] = rig.engine.open
        rig.engine.say(rig.engine.end(uid, "stop"))
        assert await ends_of(peer, 1) == Counter({("old", 0, "stop"): 1})
        assert rig.running is not None
        await asyncio.wait_for(rig.running, 20)


async def test_what_outlives_the_drain_ends_with_shutting_down() -> None:
    async with make_rig(drain_seconds=0.05) as rig:
        rig.engine.auto = None
        peer = rig.router.connect()
        peer.send(Generate(rid="a", prompt="x"))
        await until(lambda: rig.engine.open)
        rig.stop.set()
        assert rig.running is not None
        await asyncio.wait_for(rig.running, 20)
        assert await ends_of(peer, 1) == Counter({("a", 0, "error"): 1})


@pytest.mark.parametrize("seed", range(8))
async def test_exactly_one_end_under_any_schedule(seed: int) -> None:
    """Random requests, aborts, deaths, stalls and engine steps."""
    dice = random.Random(seed)
    async with make_rig(stall_seconds=0.05, mark=100_000) as rig:
        rig.engine.auto = None
        peers = [rig.router.connect() for _ in range(4)]
        dead = peers.pop()
        due: dict[int, Counter[tuple[str, int]]] = {n: Counter() for n in range(len(peers))}
        for number in range(150):
            _act(dice, rig, peers, dead, due, number)
            if dice.random() < 0.4:
                await asyncio.sleep(dice.choice([0, 0.001, 0.01]))
        dead.close()
        rig.engine.turns = rig.engine.obeys = True
        for peer in peers:
            peer.send(Abort())
        await until(lambda: not len(rig.service._requests))
        await until(lambda: set(rig.engine.open) <= {abort.uid for abort in rig.engine.aborts()})
        for number, peer in enumerate(peers):
            seen: Counter[tuple[str, int]] = Counter()
            refused: set[str] = set()
            for (rid, index, _), times in (await ends_of(peer, 1)).items():
                if index < 0:
                    refused.add(rid)
                else:
                    seen[rid, index] += times
            for rid, index in due[number]:
                assert seen[rid, index] == (0 if rid in refused else 1), (rid, index)
            assert set(seen) <= set(due[number])
        assert not rig.service._requests.peers()


def _act(
    dice: random.Random,
    rig: Rig,
    peers: list[MemoryDealer],
    dead: MemoryDealer,
    due: dict[int, Counter[tuple[str, int]]],
    number: int,
) -> None:
    which = dice.randrange(len(peers))
    action = dice.random()
    if action < 0.35:
        n = dice.choice([1, 1, 2, 4])
        prompt = "x" * dice.choice([0, 3, 20, 9000])
        seed = dice.getrandbits(8)
        request = Generate(rid=str(number), prompt=prompt, n=n, params=SamplingParams(seed=seed))
        peers[which].send(request)
        due[which].update((str(number), index) for index in range(n))
        if number < 100:
            dead.send(request)
    elif action < 0.5:
        peers[which].send(Abort(rid=str(dice.randrange(number + 1))))
    elif action < 0.55:
        rig.engine.turns = not rig.engine.turns
    elif action < 0.6:
        rig.engine.obeys = not rig.engine.obeys
    elif rig.engine.open:
        uid = dice.choice(list(rig.engine.open))
        if dice.random() < 0.5:
            rig.engine.say(rig.engine.item(uid, "t", opened=True))
        else:
            end = rig.engine.end(uid, "stop", stopped=dice.random() < 0.5)
            rig.engine.say(*[end] * dice.choice([1, 1, 1, 2]))
