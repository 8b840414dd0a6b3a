"""Blocks on their way to a device: never written over while they are read, however many a step sends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from srt.runner.staging import BLOCKS, Staging
from srt.runner.timeline import Mark

CPU = torch.device("cpu")


class LateMark:
    """Reached when it is waited for, or when the test says so."""

    def __init__(self) -> None:
        self.reached, self.waited = False, False

    def is_reached(self) -> bool:
        return self.reached

    def wait(self) -> None:
        self.waited = not self.reached
        self.reached = True

    def seconds_since(self, earlier: Mark) -> float:
        return 0.0


class Watched(Staging):
    """Remembers which blocks it gave out."""

    def __init__(self) -> None:
        super().__init__(CPU, 64)
        self.given: list[int] = []

    def _take(self, num_bytes: int) -> torch.Tensor:
        block = super()._take(num_bytes)
        self.given.append(block.data_ptr())
        return block


def numbers(first: int, count: int = 5) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(first, first + count, dtype=np.int64)


@pytest.mark.parametrize("num", [1, BLOCKS, BLOCKS + 1, 5 * BLOCKS])
def test_a_step_may_send_any_number(num: int) -> None:
    staging = Watched()
    for step in range(4):
        sent = [staging.send([numbers(at), numbers(step, 2)]) for at in range(num)]
        for at, (one, two) in enumerate(sent):
            assert one.tolist() == list(range(at, at + 5)) and two.tolist() == [step, step + 1]
        assert len(set(staging.given)) == num, "a step wrote over what it had sent"
        mark = LateMark()
        mark.reached = True
        staging.used(mark)
        staging.given.clear()


def test_a_block_is_written_again_only_behind_its_mark() -> None:
    """Steps of three, none of which is reached by itself: the oldest is waited for, and no other."""
    staging = Watched()
    marks: list[LateMark] = []
    for step in range(20):
        behind = [staging.given[3 * at : 3 * at + 3] for at in range(step)]
        for _ in range(3):
            staging.send([numbers(step)])
        fresh = set(staging.given[3 * step :])
        for mark, blocks in zip(marks, behind, strict=True):
            assert mark.reached or not fresh.intersection(blocks)
        marks.append(LateMark())
        staging.used(marks[-1])
    waited = [mark.waited for mark in marks]
    assert waited == sorted(waited, reverse=True) and sum(waited) == 20 - BLOCKS // 3
    assert len(set(staging.given)) == BLOCKS


def test_two_steps_in_flight_wait_for_nothing() -> None:
    staging, marks = Watched(), [LateMark() for _ in range(30)]
    for step, mark in enumerate(marks):
        if step > 1:
            marks[step - 2].reached = True
        for _ in range(6):  # the most a step of guesses and prompts sends
            staging.send([numbers(step)])
        staging.used(mark)
    assert not any(mark.waited for mark in marks)


def test_a_large_block_replaces_a_small_one() -> None:
    staging = Watched()
    for size in (1, 1000, 3, 5000):
        [sent] = staging.send([numbers(7, size)])
        assert sent.tolist() == list(range(7, 7 + size))
        staging.used(LateMark())
