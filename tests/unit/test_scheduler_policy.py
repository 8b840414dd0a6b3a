"""Order, shares and bounds of admission; budgets; the reasons that waiting requests are given."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_fakes import Box, HashWorker, prompt, work

from srt.scheduler.budget import MIN_GROWTH, Growth, Settings, chunk_length, pages_for
from srt.scheduler.policy import (
    LEVEL_SECONDS,
    MAX_OVERTAKES,
    PREFIX_TOKENS_PER_SECOND,
    TENANTS_REMEMBERED,
    Shares,
    note_overtaking,
    rank,
    share_out,
)
from srt.scheduler.request import Request


def waiting(uid: int, arrived: float = 0.0, **more: Any) -> Request:
    item = work(uid, [1] * more.pop("length", 4), **more)
    return Request(
        work=item, sequence=uid, arrived=arrived, deadline=None, max_output=8,
        stop_ids=frozenset(), tokens=list(item.token_ids), prompt_len=len(item.token_ids),
    )  # fmt: skip


def uids(requests: Any) -> list[int]:
    return [request.uid for request in requests]


def test_fcfs_is_the_order_of_arrival() -> None:
    line = [waiting(1, priority=0), waiting(2, priority=9)]
    assert uids(rank(line, "fcfs", 100.0, lambda r: r.uid * 100)) == [1, 2]


def test_longest_prefix_goes_by_cached_tokens_and_age() -> None:
    line = [waiting(1, arrived=0.0), waiting(2, arrived=1.0), waiting(3, arrived=1.0)]
    cached = {1: 0, 2: 50, 3: 100}
    assert uids(rank(line, "longest-prefix", 1.0, lambda r: cached[r.uid])) == [1, 3, 2]
    cached[3] = int(PREFIX_TOKENS_PER_SECOND) + 1
    assert uids(rank(line, "longest-prefix", 1.0, lambda r: cached[r.uid])) == [3, 1, 2]


def test_priority_ages() -> None:
    line = [waiting(1, arrived=0.0), waiting(2, arrived=0.0, priority=2)]
    assert uids(rank(line, "priority", 1.0, lambda r: 0)) == [2, 1]
    late = [line[0], waiting(3, arrived=3 * LEVEL_SECONDS, priority=2)]
    assert uids(rank(late, "priority", 3 * LEVEL_SECONDS, lambda r: 0)) == [1, 3]


def test_overtaking_is_bounded_whatever_the_clock_says() -> None:
    old = waiting(1)
    for uid in range(2, MAX_OVERTAKES + 2):
        newer = waiting(uid, priority=5)
        assert uids(rank([old, newer], "priority", 0.0, lambda r: 0)) == [uid, 1]
        note_overtaking([old, newer], newer)
    assert uids(rank([old, waiting(999, priority=5)], "priority", 0.0, lambda r: 0)) == [1, 999]


def test_shares_interleave_tenants_by_tokens() -> None:
    shares = Shares()
    line = [waiting(uid, tenant="flood", length=10) for uid in range(1, 6)]
    line += [waiting(6, tenant="quiet", length=10), waiting(7, tenant="quiet", length=10)]
    for request in line:
        shares.arrive(request.tenant)
    shares.charge("flood", 15)
    assert uids(share_out(line, "fcfs", 0.0, shares)) == [6, 7, 1, 2, 3, 4, 5]
    shares.charge("quiet", 10)
    assert uids(share_out(line, "fcfs", 0.0, shares)) == [6, 1, 7, 2, 3, 4, 5]


def test_priority_levels_stand_above_shares() -> None:
    shares = Shares()
    line = [waiting(1, tenant="a"), waiting(2, tenant="b", priority=1)]
    for request in line:
        shares.arrive(request.tenant)
    shares.charge("b", 1000)
    ranked = rank(line, "priority", 0.0, lambda r: 0)
    assert uids(share_out(ranked, "priority", 0.0, shares)) == [2, 1]


def test_a_tenant_that_was_away_has_no_claim_to_the_past() -> None:
    shares = Shares()
    shares.arrive("busy")
    shares.charge("busy", 5000)
    shares.arrive("new")
    assert shares.served("new") == 5000
    shares.leave("busy")
    shares.arrive("busy")
    assert shares.served("busy") == 5000


def test_shares_remember_a_bounded_number_of_tenants() -> None:
    shares = Shares()
    for index in range(3 * TENANTS_REMEMBERED):
        shares.arrive(str(index))
        shares.charge(str(index), index)
        shares.leave(str(index))
    assert len(shares._served) <= TENANTS_REMEMBERED + 1
    assert shares.num_tenants == 0


@pytest.mark.parametrize(
    ("remaining", "chunk", "left", "is_first", "expected"),
    [(100, 16, 64, True, 16), (10, 16, 64, True, 10), (100, 16, 5, False, 5), (9, 16, 0, True, 0),
     (100, 0, 128, False, 100), (100, 0, 64, False, 0), (100, 0, 64, True, 64)],
)  # fmt: skip
def test_chunks(remaining: int, chunk: int, left: int, is_first: bool, expected: int) -> None:
    assert chunk_length(remaining, chunk, left, is_first=is_first) == expected


def test_growth_follows_retractions_and_finishes() -> None:
    growth = Growth()
    before = growth.tokens
    growth.after_retraction()
    assert growth.tokens == 2 * before
    for _ in range(200):
        growth.after_finish()
    assert growth.tokens == MIN_GROWTH
    assert pages_for(0, 4) == 0 and pages_for(5, 4) == 2


def test_settings_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="max_running"):
        Settings(max_running=0, max_step_tokens=8, chunked_prefill_size=0)
    with pytest.raises(ValueError, match="max_step_tokens"):
        Settings(max_running=1, max_step_tokens=1, chunked_prefill_size=0)


def reason(box: Box, uid: int) -> str:
    return box.state(uid)["waits_for"]["reason"]


def test_every_wait_has_its_reason() -> None:
    box = Box(max_running=1)
    box.turn(work(1, [1], 100), work(2, [2]), work(3, [3]))
    assert (reason(box, 2), reason(box, 3)) == ("rows", "rows")
    box = Box(HashWorker(num_pages=17, page_size=4))
    box.turn(work(1, prompt(1, 30), 20), work(2, prompt(2, 30), 20), work(3, [3]))
    assert (reason(box, 2), reason(box, 3)) == ("pages", "behind")
    numbers = box.state(2)["waits_for"]
    assert numbers["needed"] > numbers["free"] + numbers["evictable"] and numbers["free"] >= 0
    assert box.state(3)["waits_for"]["behind"] == 2 and box.state(3)["position"] == 1
    box = Box(max_step_tokens=8, chunked_prefill_size=8)
    box.turn(work(1, prompt(1, 30)), work(2, prompt(2, 30)))
    assert reason(box, 2) == "token_budget"
    box = Box(max_step_tokens=40, chunked_prefill_size=0)
    box.turn(work(1, prompt(1, 30)), work(2, prompt(2, 30)), work(3, [3]))
    assert box.scheduler._queue.reasons().total() == 2
    assert "chunk_budget" in {r.value for r in box.scheduler._queue.reasons()}
    box = Box(HashWorker(num_pages=41, page_size=4), max_running=4)
    box.turn(work(9, [1], 20, tenant="b"))  # little so far
    box.turn(work(1, prompt(1, 60), 60, tenant="a"))
    box.turn(work(2, prompt(2, 60), 9, tenant="a"), work(3, prompt(3, 60), 60, tenant="b"))
    assert (reason(box, 3), reason(box, 2)) == ("pages", "fairness")


def test_no_tenant_starves_another() -> None:
    """A flood of one tenant delays a newcomer by the requests that run, not by those that wait."""
    box = Box(max_running=2)
    box.turn(*(work(uid, prompt(uid, 8), 8, tenant="flood") for uid in range(1, 60)))
    box.turn()
    box.turn(work(100, prompt(100, 8), 8, tenant="quiet"))
    box.run()
    order = list(box.items)
    ends = sorted(order, key=lambda uid: box.finish(uid).timing.queue)
    assert ends.index(100) <= 4


@pytest.mark.parametrize("policy", ("fcfs", "longest-prefix", "priority"))
def test_a_stream_of_favourites_cannot_starve_a_request(policy: str) -> None:
    """One request of low priority and with nothing cached, against ever new ones of the opposite."""
    box = Box(max_running=1, policy=policy, clock_step=1e-6)
    shared = prompt(0, 40)
    box.turn(work(1, shared, 2, priority=9))
    box.turn(work(2, prompt(2, 20), 2))
    for uid in range(3, 300):
        box.turn(work(uid, [*shared, uid % 60], 1, priority=9))
        if any(item.finish for item in box.items.get(2, [])):
            break
    else:
        raise AssertionError("it starves")
    assert uid <= 2 * MAX_OVERTAKES + 10


def test_a_big_request_is_not_passed_by_small_ones_for_ever() -> None:
    box = Box(HashWorker(num_pages=33, page_size=4))
    box.turn(work(1, prompt(1, 40), 30))
    box.turn(work(2, prompt(2, 100), 8))
    for uid in range(3, 60):
        box.turn(work(uid, prompt(uid, 4), 8))
    box.run()
    starts = [setup.prompt_len for batch in box.worker.batches for setup in batch.setups]
    assert starts == [40, 100, *[4] * 57]
    assert box.finish(2).reason == "length"
