"""`--max-itl-ms`: the prompts' share of a step follows from measured times."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from scheduler_fakes import Box, HashTicket, HashWorker, prompt, work

from srt.protocols.forward_batch import ForwardBatch, StepResult
from srt.scheduler.budget import Settings
from srt.scheduler.mean import Line, Mean
from srt.scheduler.promise import MIN_CHUNK, Promise, Room
from srt.scheduler.request import Reason

Cost = Callable[[int, list[tuple[int, int]]], float]  # decodes, chunks -> seconds


def cheap(decodes: int, chunks: list[tuple[int, int]]) -> float:
    """10 ms, 0.5 ms for a decode, and for a prompt token 0.5 ms, twice that behind 1000 others."""
    return 0.010 + 0.0005 * decodes + sum(n * 0.0005 * (1 + s / 1000) for s, n in chunks)


class TimedTicket(HashTicket):
    def __init__(self, result: StepResult | None, pass_time: Callable[[float], None]) -> None:
        super().__init__(result)
        self.pass_time = pass_time

    def wait(self) -> StepResult:
        result = super().wait()
        self.pass_time(result.forward_seconds)
        return result


class TimedWorker(HashWorker):
    """Steps take what `cost` says on the box's clock, which is set when the box is there."""

    def __init__(self, cost: Cost, **more: Any) -> None:
        super().__init__(num_pages=1024, **more)
        self.cost = cost
        self.seconds: list[float] = []
        self.box: Box | None = None

    def launch(self, batch: ForwardBatch) -> HashTicket:
        result = super().launch(batch).result
        assert result is not None
        chunks = [(s.start, s.length) for s in batch.slices if s.tokens is not None]
        result.forward_seconds = self.cost(len(batch.slices) - len(chunks), chunks)
        self.seconds.append(result.forward_seconds)
        return TimedTicket(result, self.pass_time)

    def pass_time(self, seconds: float) -> None:
        assert self.box is not None
        self.box.now += seconds


def timed(cost: Cost, limit: float | None, **more: Any) -> tuple[Box, TimedWorker]:
    worker = TimedWorker(cost)
    box = Box(
        worker, clock_step=0.00002,
        **{"max_itl": limit, "max_step_tokens": 264, "chunked_prefill_size": 256, **more},
    )  # fmt: skip
    worker.box = box
    return box, worker


def newcomer(
    limit: float | None, cost: Cost = cheap, **more: Any
) -> tuple[Box, list[tuple[int, float]]]:
    """Three streams run, two long prompts come. Of every step that had both: prompt tokens, seconds."""
    box, worker = timed(cost, limit, **more)
    box.turn(*(work(uid, prompt(uid, 9), 300) for uid in (1, 2, 3)))
    for _ in range(12):
        box.turn()
    box.turn(work(4, prompt(4, 480), 2), work(5, prompt(5, 480), 2))
    box.run()
    mixed = []
    for batch, seconds in zip(worker.batches, worker.seconds, strict=True):
        lengths = [piece.length for piece in batch.slices if piece.tokens is not None]
        if lengths and len(lengths) < len(batch.slices):
            mixed.append((sum(lengths), seconds))
    return box, mixed


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("limit", (0.030, 0.060, 0.100))
def test_a_newcomer_keeps_to_the_promise_and_uses_it(limit: float, depth: int) -> None:
    box, mixed = newcomer(limit, depth=depth)
    assert all(seconds < limit for _, seconds in mixed)
    assert value(box, "itl_broken_total") == 0
    used = [seconds for length, seconds in mixed[6:-2]]
    assert min(used) > 0.6 * limit, "else prompts wait for nothing"


def test_without_a_promise_the_chunk_is_what_was_configured() -> None:
    _, mixed = newcomer(None)
    assert max(length for length, _ in mixed) > 200
    assert max(seconds for _, seconds in mixed) > 0.1


def test_tokens_further_back_cost_more_and_chunks_shrink() -> None:
    _, mixed = newcomer(0.060)
    lengths = [length for length, _ in mixed[5:9]]
    assert all(before >= after for before, after in pairwise(lengths)) and lengths[0] > lengths[-1]


def test_a_promise_that_cannot_be_kept_starves_no_prompt_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        box, mixed = newcomer(0.005)
    assert len(box.tokens(5)) == 2
    assert {length for length, _ in mixed[:-2]} == {MIN_CHUNK}
    assert sum("cannot be kept" in record.message for record in caplog.records) == 1


def test_what_waits_for_the_promise_is_told() -> None:
    box, _ = timed(cheap, 0.030, chunked_prefill_size=16)
    box.turn(work(1, prompt(1, 9), 100))
    for _ in range(5):
        box.turn()
    box.turn(*(work(uid, prompt(uid, 300), 2) for uid in (2, 3, 4)))
    box.turn()
    reasons = {box.state(uid)["waits_for"]["reason"] for uid in (3, 4)}
    assert reasons == {Reason.PROMISE.value}
    box.run()


def test_a_step_that_nobody_waits_for_is_not_limited() -> None:
    box, worker = timed(cheap, 0.012)
    box.turn(work(1, prompt(1, 400), 2))
    box.run()
    assert [piece.length for batch in worker.batches[:2] for piece in batch.slices] == [256, 144]


@pytest.mark.parametrize("limit", (0.001, 0.012, 0.030, 1.0))
def test_answers_are_the_same_with_and_without(limit: float) -> None:
    answers = []
    for promised in (None, limit):
        box, _ = newcomer(promised, depth=1)
        answers.append([box.tokens(uid) for uid in range(1, 6)])
    assert answers[0] == answers[1]


def test_late_tokens_are_counted() -> None:
    turns = iter(range(1000))

    def cost(decodes: int, chunks: list[tuple[int, int]]) -> float:
        return 0.2 if next(turns) % 8 == 3 else 0.01

    box, worker = timed(cost, 0.060)
    box.run(work(1, prompt(1, 5), 33))
    assert value(box, "itl_broken_total") == worker.seconds.count(0.2) == 4


def test_the_step_log_explains_it() -> None:
    box, _ = newcomer(0.060)
    profile = box.ask("profile").body
    known = profile["promise"]
    assert known["max_itl_ms"] == pytest.approx(60)
    assert known["plain_ms"]["decode 2..3"] == pytest.approx(11.5, abs=1)
    assert known["prompt_token_ms"] == pytest.approx(0.5, rel=0.2)
    assert known["host_ms"] < 1
    assert MIN_CHUNK <= profile["groups"]["prefill"]["prefill_room"] <= 264
    assert 0 < value(box, "prefill_room_tokens") < 264
    box, _ = timed(cheap, None)
    assert box.ask("profile").body["promise"] is None


def value(box: Box, name: str) -> float:
    [(_, found)] = box.scheduler.stats()[f"tandem_{name}"]["samples"]
    return float(found)


# --- the parts --------------------------------------------------------------------------------------


def test_first_steps_trust_nothing_and_double() -> None:
    promise = Promise(0.1)
    room = promise.room(4, 256)
    assert room.left() == 2 * MIN_CHUNK
    for step, expected in enumerate((64, 128, 256, 256)):
        promise.note(step, 4, [(0, room.left())], 0.0001, 0.02 * step)
        room = promise.room(4, 256)
        assert room.left() == expected


def test_a_late_step_takes_trust_back() -> None:
    promise = Promise(0.05)
    for step in range(20):
        promise.note(step, 4, [(0, 64)], 0.040, 0.04 * step)
    before = promise.room(4, 256).left()
    promise.note(20, 4, [(0, 64)], 0.4, 1.2)
    assert MIN_CHUNK <= promise.room(4, 256).left() < before


def test_host_time_is_part_of_the_gap() -> None:
    rooms = []
    for pause in (0.0, 0.010):
        promise, now = Promise(0.050), 0.0
        for step in range(40):
            now += 0.010 + pause
            promise.note(step, 4, [], 0.010, now)
        for step in range(40, 80):
            now += 0.030 + pause
            promise.note(step, 4, [(0, 40)], 0.030, now)
        rooms.append(promise.room(4, 256).left())
    assert rooms[0] == pytest.approx(70, abs=3) and rooms[1] == pytest.approx(50, abs=3)


def test_a_pause_between_steps_that_are_not_neighbours_is_nobodys() -> None:
    promise = Promise(0.050)
    promise.note(1, 4, [], 0.01, 1.0)
    promise.note(3, 4, [], 0.01, 9.0)
    assert promise.describe() is not None and promise.describe()["host_ms"] == 0  # type: ignore[index]


def test_room_is_shared_by_the_prompts_of_a_step() -> None:
    price = Line()
    price.add(0, 0.001, 100)
    room = Room(256, 0.050, price, 1000)
    assert room.left() == 50
    room.take(0, 30)
    assert (room.left(), room.offered) == (20, 50)
    room.take(0, 20)
    assert room.left() == 0 and room.reason is Reason.PROMISE
    room = Room(10, inf, price, 1000)
    room.take(0, 10)
    assert room.left() == 0 and room.reason is Reason.TOKEN_BUDGET


def test_the_least_chunk_is_for_the_first_prompt_of_a_step() -> None:
    price = Line()
    price.add(0, 0.001, 100)
    room = Room(256, -1.0, price, 1000)
    assert room.left() == MIN_CHUNK
    room.take(0, 3)
    assert room.left() == 0
    assert Room(5, -1.0, price, 1000).left() == 5


def test_line_finds_a_line_and_never_falls() -> None:
    line = Line()
    for x in range(0, 1000, 50):
        line.add(x, 2 + 0.01 * x, 50)
    assert line.at(0) == pytest.approx(2.0, abs=0.3)
    assert line.at(4000) == pytest.approx(42, rel=0.02)
    falling = Line()
    for x in range(0, 1000, 50):
        falling.add(x, 20 - 0.01 * x, 50)
    assert falling.at(4000) == falling.at(0) == falling.mean_y
    steep = Line()
    steep.add(1000, 1.0, 1)
    steep.add(1100, 9.0, 1)
    assert steep.at(0) == steep.mean_y / 4
    assert Line().at(5) == 0


def test_mean_forgets() -> None:
    mean = Mean()
    for _ in range(50):
        mean.add(1.0)
    for _ in range(50):
        mean.add(3.0)
    assert mean.value == pytest.approx(3.0, abs=0.01)


def test_whole_prompts_and_a_promise_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="whole prompts"):
        Settings(max_running=4, max_step_tokens=64, chunked_prefill_size=0, max_itl=0.05)
