"""How many guesses a decode gets."""

from __future__ import annotations

from typing import Any

from scheduler_fakes import prompt, work

from srt.scheduler.pace import LONGEST_WAIT, Pace
from srt.scheduler.request import Request


def request(max_output: int = 1000, **fields: Any) -> Request:
    its = work(1, prompt(1, 4))
    return Request(
        work=its, sequence=1, arrived=0.0, deadline=None, max_output=max_output,
        stop_ids=frozenset(), tokens=[1, 2, 3, 4], prompt_len=4, **fields,
    )  # fmt: skip


def test_off_is_off() -> None:
    assert Pace(most=0, budget=100).allot([request(), request()]) == [0, 0]


def test_many_requests_leave_nothing_for_guesses() -> None:
    pace = Pace(most=4, budget=16)
    assert pace.allot([request()]) == [4]
    assert pace.allot([request() for _ in range(3)]) == [4, 4, 4]
    assert pace.allot([request() for _ in range(5)]) == [2] * 5
    assert pace.allot([request() for _ in range(8)]) == [1] * 8
    assert pace.allot([request() for _ in range(9)]) == [0] * 9
    assert pace.allot([]) == []


def test_never_more_than_it_may_generate() -> None:
    pace = Pace(most=8, budget=100)
    assert [pace.allot([request(n)])[0] for n in range(1, 5)] == [0, 1, 2, 3]
    assert pace.allot([request(5, in_flight=2)]) == [2]


def test_length_follows_success() -> None:
    pace, its = Pace(most=8, budget=100), request()
    pace.learn(its, 8, 2)
    assert pace.allot([its]) == [3]
    pace.learn(its, 3, 3)
    assert pace.allot([its]) == [6]
    pace.learn(its, 6, 6)
    assert pace.allot([its]) == [8]


def test_misses_make_it_pause_longer_and_longer_and_a_hit_ends_that() -> None:
    pace, its = Pace(most=8, budget=100), request()
    pauses = []
    for _ in range(12):
        pace.learn(its, 1, 0)
        waited = 0
        while pace.allot([its]) == [0]:
            waited += 1
        pauses.append(waited)
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 32, *[LONGEST_WAIT] * 4]
    pace.learn(its, 1, 1)
    pace.learn(its, 2, 0)
    assert pace.allot([its]) == [1]
