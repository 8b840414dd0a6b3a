"""`--max-itl-ms`: no more of a prompt goes into a step than leaves the running requests' tokens in time.

A step of d decode tokens beside chunks of prompts is expected to take

    plain(d) + sum(length * price(start) for each chunk) + host

plain: running mean of the steps without prompts, per power of two of d. price: seconds for one prompt
token, a running line over the chunk's start, because a token looks back at all before it. host: what
passes between two steps beside the worker's own time. Chunks get what the promise leaves after a
tenth and twice the mean error of this expectation, at least MIN_CHUNK tokens a step: a prompt never
starves, and a promise that the machine cannot keep is counted and logged, not enforced. What was never
measured is not trusted: the tokens beside decodes at most double from one step to the next.

All that is measured comes with the results of steps and readings of the recorded clock, so a replay
decides as the recorded run did. A step in which nobody waits for a next token is not limited.
"""

from __future__ import annotations

import logging
from math import inf
from typing import Any

from srt.config.rules_schedule import LEAST_CHUNK as MIN_CHUNK
from srt.scheduler.mean import Line, Mean
from srt.scheduler.request import Reason

log = logging.getLogger(__name__)

ERRORS = 2.0  # mean errors that are kept free
SLACK = 0.1  # of the promise, kept free beside them

Chunk = tuple[int, int]  # start, length


class Room:
    """What a step has for prompts: tokens, and where somebody waits for his next token, seconds."""

    def __init__(
        self, tokens: int, seconds: float = inf, price: Line | None = None, most: int | None = None
    ) -> None:
        """`most`: tokens that may be trusted to the price; None: any number."""
        self.offered: int | None = None  # tokens, when the first chunk was cut
        self._tokens = tokens
        self._seconds = seconds
        self._price = price
        self._trusted = tokens if most is None else most
        self._is_empty = True

    def left(self, start: int = 0) -> int:
        """Tokens of a prompt of which `start` tokens are there already."""
        return max(min(self._tokens, self._in_time(start)), 0)

    @property
    def reason(self) -> Reason:
        """What there is least of."""
        return Reason.PROMISE if self._in_time(0) < self._tokens else Reason.TOKEN_BUDGET

    def take(self, start: int, length: int) -> None:
        if self.offered is None:
            self.offered = self.left(start)
        self._tokens -= length
        self._trusted -= length
        if self._price is not None:
            self._seconds -= length * self._price.at(start)
        self._is_empty = False

    def _in_time(self, start: int) -> int:
        if self._price is None:
            return self._tokens
        price, fits = self._price.at(start), self._trusted
        if price * fits > self._seconds:
            fits = int(self._seconds / price) if self._seconds > 0 else 0
        return max(fits, MIN_CHUNK) if self._is_empty else fits


class Promise:
    """Asked for the room of each step and told of each result. `limit` in seconds; None: no promise."""

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._plain: dict[int, Mean] = {}  # by bit length of the number of decode tokens
        self._price = Line()
        self._host = Mean()
        self._error = Mean()
        self._most = 2 * MIN_CHUNK
        self._last: tuple[int, float] | None = None  # step and clock of the latest result
        self._is_warned = False

    def room(self, decode_tokens: int, tokens: int) -> Room:
        """For a step with so many decode tokens and `tokens` left for prompts."""
        if self.limit is None or not decode_tokens:
            return Room(tokens)
        seconds = self.limit - self._kept_free() - self._host.value - self._expect(decode_tokens)
        return Room(tokens, seconds, self._price, self._most)

    def is_broken(self, gap: float) -> bool:
        """Whether a token that came `gap` seconds after the one before it is too late."""
        return self.limit is not None and gap > self.limit

    def note(
        self, step: int, decode_tokens: int, chunks: list[Chunk], seconds: float, now: float
    ) -> None:
        """A step came home at `now` on the clock, after `seconds` of the worker."""
        if self.limit is None:
            return
        if decode_tokens and self._last is not None and self._last[0] == step - 1:
            self._host.add(max(now - self._last[1] - seconds, 0.0))
        self._last = step, now
        plain = self._expect(decode_tokens)
        if not chunks:
            self._plain.setdefault(decode_tokens.bit_length(), Mean()).add(seconds)
            self._warn(decode_tokens)
            return
        length = sum(length for _, length in chunks)
        start = sum(start * length for start, length in chunks) / length
        if decode_tokens:
            expected = plain + sum(length * self._price.at(start) for start, length in chunks)
            if self._price.mass:
                self._error.add(abs(seconds - expected))
            if seconds + self._host.value <= self.limit:
                self._most = max(self._most, 2 * length)
            else:
                self._most = max(length, MIN_CHUNK)
        self._price.add(start, max(seconds - plain, 0.0) / length, length)

    def describe(self) -> dict[str, Any] | None:
        """What it knows, for the step log. Milliseconds and tokens."""
        if self.limit is None:
            return None
        plain = {
            f"decode {1 << (bits - 1)}..{(1 << bits) - 1}": 1e3 * mean.value
            for bits, mean in sorted(self._plain.items())
        }
        return {
            "max_itl_ms": 1e3 * self.limit,
            "plain_ms": plain,
            "prompt_token_ms": 1e3 * self._price.at(0),
            "prompt_token_ms_at_4096": 1e3 * self._price.at(4096),
            "host_ms": 1e3 * self._host.value,
            "kept_free_ms": 1e3 * self._kept_free(),
            "trusted_tokens": self._most,
        }

    def _kept_free(self) -> float:
        """Seconds for what the expectation does not know; never more than half of the promise."""
        assert self.limit is not None
        return min(SLACK * self.limit + ERRORS * self._error.value, self.limit / 2)

    def _expect(self, decode_tokens: int) -> float:
        """Seconds of a step without prompts; of the nearest size known if not of this one."""
        if not self._plain:
            return 0.0
        bits = decode_tokens.bit_length()
        return self._plain[min(self._plain, key=lambda known: (abs(known - bits), known))].value

    def _warn(self, decode_tokens: int) -> None:
        assert self.limit is not None
        least = self._expect(decode_tokens) + self._host.value
        if least <= self.limit or self._is_warned:
            return
        self._is_warned = True
        log.warning(
            "--max-itl-ms %g cannot be kept here: a step of %d tokens takes %.1f ms without any "
            "prompt; prompts go on with %d tokens a step",
            1e3 * self.limit,
            decode_tokens,
            1e3 * least,
            MIN_CHUNK,
        )
