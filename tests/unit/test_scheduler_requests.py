"""The life of a request: refusals, ends, aborts, deadlines, failures."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_fakes import END, Box, HashWorker, prompt, work

from srt.wire.messages import AbortWork, Drain


class Line(HashWorker):
    """Gives written-down tokens by output position; then the end token."""

    script = [10, 11, 12, 13, 14]

    def choose(self, read: list[int], seed: int, position: int, setup: Any) -> int:
        wanted = [*self.script[position:], END]
        banned = set(setup.stop_ids) if position < setup.params.min_tokens else set()
        return next(token for token in (*wanted, *range(60)) if token not in banned)


@pytest.mark.parametrize("depth", (0, 1))
def test_stop_rules(depth: int) -> None:
    box = Box(Line(), depth=depth)
    box.run(
        work(1, [1], 100, ignore_eos=False),
        work(2, [1], 3, ignore_eos=False),
        work(3, [1], 100, ignore_eos=False, stop_token_ids=[12]),
        work(4, [1], 3, stop_token_ids=[12]),  # the stop id wins over the length
        work(5, [1], 9),  # ignore_eos: end tokens are tokens
        work(6, [1], 0),
    )
    ends = {uid: (box.finish(uid).reason, box.finish(uid).matched) for uid in range(1, 7)}
    assert ends == {
        1: ("stop", END), 2: ("length", None), 3: ("stop", 12), 4: ("stop", 12),
        5: ("length", None), 6: ("length", None),
    }  # fmt: skip
    assert box.tokens(1) == [10, 11, 12, 13, 14, END]
    assert box.tokens(3) == box.tokens(4) == [10, 11, 12]
    assert box.tokens(5) == [10, 11, 12, 13, 14] + [END] * 4
    assert box.tokens(6) == []
    assert box.finish(6).usage.completion_tokens == 0


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("least", range(6))
def test_h17_min_tokens_is_exact(depth: int, least: int) -> None:
    class Early(Line):
        script = [10, END]

    box = Box(Early(), depth=depth)
    box.run(work(1, [1], 20, ignore_eos=False, min_tokens=least))
    tokens = box.tokens(1)
    assert tokens[-1] == END and END not in tokens[:-1]
    assert len(tokens) - 1 == max(least, 1)


def test_h15_what_can_never_fit_is_refused_at_once() -> None:
    box = Box(HashWorker(num_pages=257, page_size=1, context=4096), max_step_tokens=300)
    cases = {
        1: (300, None), 2: (250, 50), 3: (255, None), 4: (256, None), 5: (257, None), 6: (256, 2),
    }  # fmt: skip
    box.turn(*(work(uid, prompt(uid, n), most) for uid, (n, most) in cases.items()))
    for uid in (1, 2, 5, 6):
        end = box.finish(uid)
        assert (end.reason, end.failure.code) == ("error", "context_length_exceeded")
        assert "256" in end.failure.message and end.failure.param in ("prompt", "max_tokens")
        assert box.items[uid][0].opened is None
    box.run(work(7, [1, 2, 3, 4, 5], 4))
    assert len(box.tokens(3)) == 2 and len(box.tokens(4)) == 1 and len(box.tokens(7)) == 4


def test_context_and_empty_prompt_are_refused() -> None:
    box = Box(HashWorker(context=20))
    box.run(
        work(1, prompt(1, 20), None), work(2, prompt(1, 18), 3), work(3, []), work(4, [1], None)
    )
    assert box.finish(1).failure.code == box.finish(2).failure.code == "context_length_exceeded"
    assert (box.finish(3).failure.code, box.finish(3).failure.param) == ("invalid_value", "prompt")
    assert len(box.tokens(4)) == 19


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    box = Box(max_running=1, max_queued=2, max_queued_tokens=30)
    box.turn(work(1, prompt(1, 5), 20))
    box.turn(work(2, prompt(2, 25)), work(3, prompt(3, 25)), work(4, [1]), work(5, [1]))
    for uid in (3, 5):
        failure = box.finish(uid).failure
        assert failure.code == "queue_full" and 1 <= failure.retry_after <= 60
    box.run()
    assert box.finish(2).reason == box.finish(4).reason == "length"


def test_a_queue_takes_all_samples_of_a_request_or_none() -> None:
    """A part of them would run for a client who was told to come back, and hold the request's name."""
    box = Box(max_running=1, max_queued=2)
    box.turn(work(1, prompt(1, 5), 20))
    box.turn(*(work(10 + i, prompt(2, 5), leader=10 if i else None) for i in range(4)))
    box.turn(*(work(20 + i, prompt(3, 5), leader=20 if i else None) for i in range(4)))
    for uid in range(20, 24):
        assert box.finish(uid).failure.code == "queue_full"
    box.run()
    assert all(box.finish(uid).reason == "length" for uid in range(10, 14))


def until(box: Box, uid: int, state: str) -> None:
    for _ in range(50):
        if box.state(uid)["state"] == state:
            return
        box.turn()
    raise AssertionError(f"{uid} never gets to {state}")


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("quiet", (False, True))
@pytest.mark.parametrize("state", ("waiting", "prefilling", "running"))
def test_h16_abort_in_every_state(depth: int, quiet: bool, state: str) -> None:
    box = Box(depth=depth, max_running=2, chunked_prefill_size=4)
    box.turn(work(1, [1, 2], 40))
    others = [work(9, [9, 9], 40)] if state == "waiting" else []
    box.turn(*others, work(2, prompt(2, 20), 60))
    until(box, 2, state)
    before = len(box.items[2])
    box.turn(AbortWork(uid=2, quiet=quiet, reason="disconnect"))
    body = box.ask("requests").body
    assert 2 not in [entry["uid"] for entry in body["requests"]]
    box.run(AbortWork(uid=2))  # idempotent
    if quiet:
        assert len(box.items[2]) == before and box.items[2][-1].finish is None
    else:
        end = box.finish(2)
        assert (end.reason, end.failure.code) == ("abort", "aborted")
        assert len(box.items[2]) == before + 1
    lone = Box(radix_cache=False)
    lone.run(work(1, [1, 2], 40))
    assert box.tokens(1) == lone.tokens(1)


@pytest.mark.parametrize("depth", (0, 1))
def test_an_aborted_row_is_safe_to_reuse_in_the_very_next_step(depth: int) -> None:
    box = Box(HashWorker(max_rows=1), depth=depth)
    box.turn(work(1, prompt(1, 6), 50))
    for _ in range(5):
        box.turn()
    box.run(AbortWork(uid=1), work(2, prompt(2, 6), 30))
    lone = Box(radix_cache=False)
    lone.run(work(2, prompt(2, 6), 30))
    assert box.tokens(2) == lone.tokens(2)


def test_a_second_work_of_a_live_uid_hurts_nobody() -> None:
    box = Box()
    box.turn(work(1, prompt(1, 4), 9))
    box.run(work(1, prompt(2, 4), 9))
    lone = Box()
    lone.run(work(1, prompt(1, 4), 9))
    assert box.tokens(1) == lone.tokens(1)


@pytest.mark.parametrize("depth", (0, 1))
def test_deadlines_end_waiting_and_running_requests(depth: int) -> None:
    box = Box(depth=depth, max_running=1)
    box.turn(work(1, [1], 200, deadline=1.0), work(2, [2], 5, deadline=0.05), work(3, [3], 5))
    box.run()
    for uid in (1, 2):
        assert (box.finish(uid).reason, box.finish(uid).failure.code) == ("error", "timeout")
    assert box.finish(1).usage.completion_tokens > 5
    assert box.finish(2).usage.completion_tokens == 0
    assert box.finish(3).reason == "length"


@pytest.mark.parametrize("depth", (0, 1))
def test_the_drain_takes_nothing_new_and_ends_in_time(depth: int) -> None:
    box = Box(depth=depth, max_running=1)
    box.turn(work(1, [1], 5), work(2, [2], 200), work(3, [3], 200))
    box.run(Drain(seconds=0.5), work(4, [4]))
    assert box.finish(4).failure.code == "shutting_down"
    assert box.finish(1).reason == "length"
    for uid in (2, 3):
        assert (box.finish(uid).reason, box.finish(uid).failure.code) == ("abort", "shutting_down")


@pytest.mark.parametrize("depth", (0, 1))
def test_one_bad_slice_fails_its_request_only(depth: int) -> None:
    box = Box(HashWorker(errors={(4, 0): "logits are not numbers"}), depth=depth)
    box.run(work(1, [1, 2, 3], 20), work(2, [4, 5, 6], 20))
    assert box.finish(1).reason == "error"
    assert "not numbers" in box.finish(1).failure.message
    lone = Box(radix_cache=False)
    lone.run(work(2, [4, 5, 6], 20))
    assert box.tokens(2) == lone.tokens(2)


@pytest.mark.parametrize("depth", (0, 1))
def test_a_step_that_raises_ends_everybody_then_the_process(depth: int) -> None:
    box = Box(HashWorker(raise_at=3), depth=depth, max_running=2)
    box.turn(work(1, [1, 2, 3], 20), work(2, [4, 5, 6], 20), work(3, [7], 20))
    with pytest.raises(RuntimeError, match="the step failed"):
        box.run()
    assert box.finish(1).failure.code == box.finish(2).failure.code == "internal"
    assert box.finish(3).failure.code == "engine_dead"
    assert box.scheduler.audit() == []


@pytest.mark.parametrize("depth", (0, 1))
def test_a_request_that_ends_by_length_gets_no_step_too_many(depth: int) -> None:
    box = Box(depth=depth)
    box.run(work(1, [1, 2], 5))
    assert len(box.worker.batches) == 5


def test_min_tokens_holds_even_if_the_worker_gives_a_stop_id_early() -> None:
    class Hasty(Line):
        script = [END, END, END, END, END]

        def choose(self, read: list[int], seed: int, position: int, setup: Any) -> int:
            return END

    box = Box(Hasty())
    box.run(work(1, [1], 20, ignore_eos=False, min_tokens=3))
    assert box.tokens(1) == [END] * 4 and box.finish(1).reason == "stop"


def test_a_retracted_request_finds_its_pages_in_the_cache() -> None:
    box = Box(HashWorker(num_pages=41, page_size=4))
    box.run(work(1, prompt(1, 10), 75), work(2, prompt(2, 10), 120))
    assert [box.finish(uid).timing.retractions for uid in (1, 2)] == [0, 1]
    resumed = [
        batch.slices[[piece.row for piece in batch.slices].index(setup.row)].start
        for batch in box.worker.batches
        for setup in batch.setups
        if len(setup.tokens) > setup.prompt_len
    ]
    assert len(resumed) == 1 and 40 < resumed[0] < 80  # all but the few pages that were evicted
