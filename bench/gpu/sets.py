"""What is asked: token ids and lengths, the same for every engine that is compared."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

HIGHEST_ID = 40_000  # ids below it only, and below the vocabulary's special tokens
SPECIAL_ROOM = 512
TEMPERATURE = 0.6  # of the offline set


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `at`: seconds after the start. `seed` None: another one for every request."""

    token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    at: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large each part is, in tokens and requests."""

    prompt: int = 128
    alone: int = 256  # tokens of the answer at batch 1
    first_token: tuple[int, ...] = (1024, 8192)  # prompts whose first token is awaited
    short: tuple[int, ...] = (64, 128, 256)  # prompts whose prefill is a graph
    prefixes: tuple[tuple[int, int], ...] = ((4096, 128), (32768, 512))  # cached, and new behind it
    batches: tuple[int, ...] = (32, 256)
    batch_answer: int = 128
    offline: int = 256  # requests
    low: int = 100  # both lengths of the offline set
    high: int = 1024
    profile: tuple[int, ...] = (1, 32, 256)
    long_prompt: int = 2048  # every eighth request of the online load
    online_answer: tuple[int, int] = (64, 320)
    online_seconds: float = 12.0
    max_running: int = 256


FULL = Sizes()
SMALL = Sizes(
    prompt=16,
    alone=24,
    first_token=(64, 256),
    short=(16, 32),
    prefixes=((128, 32),),
    batches=(2, 8),
    batch_answer=16,
    offline=12,
    low=4,
    high=32,
    profile=(1, 8),
    long_prompt=64,
    online_answer=(4, 16),
    online_seconds=2.0,
    max_running=8,
)


class Prompts:
    """Fresh random token ids; the same for the same seed."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._limit = min(HIGHEST_ID, max(2, vocab_size - SPECIAL_ROOM))

    def ids(self, length: int) -> list[int]:
        return [self._draw.randrange(self._limit) for _ in range(length)]

    def batch(self, count: int, length: int, answer: int) -> list[Ask]:
        """Greedy requests of one size."""
        return [Ask(token_ids=self.ids(length), max_tokens=answer) for _ in range(count)]


def offline_set(sizes: Sizes, vocab_size: int) -> list[Ask]:
    """All at once: both lengths uniform in [low, high], drawn by `random.Random(0)`, prompts first."""
    draw, prompts = random.Random(0), Prompts(vocab_size, 1)
    lengths = [draw.randint(sizes.low, sizes.high) for _ in range(sizes.offline)]
    answers = [draw.randint(sizes.low, sizes.high) for _ in range(sizes.offline)]
    return [
        Ask(token_ids=prompts.ids(length), max_tokens=answer, temperature=TEMPERATURE)
        for length, answer in zip(lengths, answers, strict=True)
    ]


def online_mix(sizes: Sizes, vocab_size: int, count: int, seed: int) -> list[Ask]:
    """Prompts as in the offline set, but every eighth is a long one; shorter answers."""
    draw, prompts = random.Random(seed), Prompts(vocab_size, seed + 1)
    asks = []
    for number in range(count):
        length = draw.randint(sizes.low, sizes.high)
        asks.append(
            Ask(
                token_ids=prompts.ids(sizes.long_prompt if number % 8 == 7 else length),
                max_tokens=draw.randint(*sizes.online_answer),
                temperature=TEMPERATURE,
            )
        )
    return asks


def at_poisson_times(asks: list[Ask], rate: float, seed: int) -> list[Ask]:
    """The same, arriving at `rate` a second with exponential gaps."""
    draw, now, found = random.Random(seed), 0.0, []
    for ask in asks:
        now += draw.expovariate(rate)
        found.append(replace(ask, at=now))
    return found
