"""How many guesses a decode gets."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_fakes import prompt, work

from srt.scheduler.balance import FEW, LONGEST_REST, REFRESH, SHORTEST_REST, Balance
from srt.scheduler.pace import LONGEST_WAIT, Pace
from srt.scheduler.request import Request


def request(max_output: int = 1000, **fields: Any) -> Request:
    its = work(1, prompt(1, 4))
    return Request(
        work=its, sequence=1, arrived=0.0, deadline=None, max_output=max_output,
        stop_ids=frozenset(), tokens=[1, 2, 3, 4], prompt_len=4, **fields,
    )  # fmt: skip


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Balance, "pays", lambda *_: True)


def test_off_is_off() -> None:
    assert Pace(most=0, budget=100).allot([request(), request()]) == [0, 0]


def test_many_requests_leave_nothing_for_guesses(eager: None) -> None:
    pace = Pace(most=4, budget=16)
    assert pace.allot([request()]) == [4]
    assert pace.allot([request() for _ in range(3)]) == [4, 4, 4]
    assert pace.allot([request() for _ in range(5)]) == [2] * 5
    assert pace.allot([request() for _ in range(8)]) == [1] * 8
    assert pace.allot([request() for _ in range(9)]) == [0] * 9
    assert pace.allot([]) == []


def test_guesses_that_are_computed_whole_are_given_whole_or_not_at_all(eager: None) -> None:
    pace, its = Pace(most=3, budget=16, is_whole=True), request()
    for _ in range(10):
        pace.learn(its, 3, 0)
    assert pace.allot([its] * 4) == [3] * 4
    assert pace.allot([its, request(2)]) == [3, 1]
    assert pace.allot([request() for _ in range(5)]) == [0] * 5


def test_never_more_than_it_may_generate(eager: None) -> None:
    pace = Pace(most=8, budget=100)
    assert [pace.allot([request(n)])[0] for n in range(1, 5)] == [0, 1, 2, 3]
    assert pace.allot([request(5, in_flight=2)]) == [2]


def test_length_follows_success(eager: None) -> None:
    pace, its = Pace(most=8, budget=100), request()
    pace.learn(its, 8, 2)
    assert pace.allot([its]) == [3]
    pace.learn(its, 3, 3)
    assert pace.allot([its]) == [6]
    pace.learn(its, 6, 6)
    assert pace.allot([its]) == [8]


def test_misses_make_it_pause_longer_and_longer_and_a_hit_ends_that(eager: None) -> None:
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


def step(balance: Balance, plain: float, guessed: float, gain: float) -> bool:
    """One step of one decode, guessed if that pays. Says which it was."""
    has_guesses = balance.pays(1)
    if has_guesses:
        balance.note(1, 2 if gain == 2 else 1, guessed, has_guesses=True)
    else:
        balance.note(1, 1, plain, has_guesses=False)
    return has_guesses


def test_guesses_that_pay_go_on_and_plain_steps_are_measured_now_and_then() -> None:
    balance = Balance()
    steps = [step(balance, 0.010, 0.015, gain=2) for _ in range(FEW + 2 * (REFRESH + 1))]
    assert steps == [False] * FEW + ([True] * REFRESH + [False]) * 2


def test_guesses_that_do_not_pay_rest_longer_and_longer() -> None:
    balance = Balance()
    steps = [step(balance, 0.010, 0.012, gain=1) for _ in range(6000)]
    rests, rest = [], 0
    for has_guesses in steps[FEW:]:
        if not has_guesses:
            rest += 1
        elif rest:
            rests.append(rest)
            rest = 0
    assert rests[:7] == [SHORTEST_REST * 2**i for i in range(6)] + [LONGEST_REST]
    assert sum(steps) < 50


def test_batches_of_another_size_are_judged_for_themselves() -> None:
    balance = Balance()
    for _ in range(FEW):
        balance.note(1, 1, 0.01, has_guesses=False)
    assert balance.pays(1) and not balance.pays(8)


def test_a_drafter_that_knows_when_to_stop_gets_all_there_is(eager: None) -> None:
    pace, its = Pace(most=6, budget=100, knows_when=True), request()
    pace.learn(its, 6, 1)
    assert pace.allot([its]) == [6]
