"""Do guesses pay? Measured, because it depends on machine, model, draft and batch.

Among n decodes a step without guesses takes `plain` seconds and gives each one token; one with guesses
takes `guessed` seconds and gives `gain` tokens on average. Guesses pay while gain * plain > guessed. All
three are running means per power of two of n. When they do not pay there are none for 32 steps, then 64
.. 1024; then a few steps show whether that is still so. Times come with the results of steps, so a
replay decides as the recorded run did.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from srt.scheduler.mean import Mean

FEW = 4  # plain steps before the first guess, and guessed ones before a verdict
REFRESH = 64  # steps with guesses between two without, so that `plain` stays true
SHORTEST_REST = 32
LONGEST_REST = 1024


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What is known of steps with about so many decodes."""

    plain: Mean = field(default_factory=Mean)
    guessed: Mean = field(default_factory=Mean)
    gain: Mean = field(default_factory=Mean)
    since_plain: int = 0
    rest: int = 0
    rest_length: int = SHORTEST_REST


class Balance:
    """Asked before a step and told after it."""

    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}

    def pays(self, num_rows: int) -> bool:
        batch = self._of(num_rows)
        if batch.rest:
            batch.rest -= 1
            return False
        return batch.plain.count >= FEW and batch.since_plain < REFRESH

    def note(self, num_rows: int, num_tokens: int, seconds: float, *, has_guesses: bool) -> None:
        """A step of `num_rows` decodes and nothing else gave `num_tokens` in `seconds`."""
        batch = self._of(num_rows)
        if not has_guesses:
            batch.since_plain = 0
            batch.plain.add(seconds)
            return
        batch.since_plain += 1
        batch.guessed.add(seconds)
        batch.gain.add(num_tokens / num_rows)
        if batch.guessed.count < FEW or batch.plain.count < FEW:
            return
        if batch.gain.value * batch.plain.value >= batch.guessed.value:
            batch.rest_length = SHORTEST_REST
            return
        batch.rest = batch.rest_length
        batch.rest_length = min(2 * batch.rest_length, LONGEST_REST)
        batch.guessed, batch.gain = Mean(), Mean()

    def _of(self, num_rows: int) -> _Batch:
        return self._batches.setdefault(num_rows.bit_length(), _Batch())
