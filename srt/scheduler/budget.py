"""The numbers that bound a step, and how much room admission leaves for growth. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from srt.scheduler.policy import POLICIES

MIN_GROWTH = 32  # tokens
MAX_GROWTH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the configuration decided. Times in seconds, lengths in tokens."""

    max_running: int  # in effect at most max_step_tokens - 1: a prompt must get a word in
    max_step_tokens: int
    chunked_prefill_size: int  # prompt tokens of one request in one step; 0: whole prompts
    max_queued: int = 1024
    max_queued_tokens: int | None = None
    policy: str = "fcfs"
    depth: Literal[0, 1] = 0  # steps launched ahead of the one whose results are awaited
    radix_cache: bool = True
    eviction_policy: str = "lru"  # or lfu
    draft_eager: bool = False  # guess whether it pays or not
    draft_knows_when: bool = False  # the drafter itself stops where guesses get unlikely
    step_log: int = 4096  # steps remembered for the profile
    max_itl: float | None = None  # seconds between two tokens that are promised, see `promise`
    draft_tokens: int = 0  # guessed tokens that a decode may verify; 0: no speculation
    draft_budget: int = 16  # decode tokens in a step, guesses included, up to which guesses may pay

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r} is none of {', '.join(POLICIES)}")
        if self.eviction_policy not in ("lru", "lfu"):
            raise ValueError(f"eviction_policy {self.eviction_policy!r} is neither lru nor lfu")
        if self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, not {self.max_running}")
        if self.max_step_tokens < 2:
            raise ValueError(f"max_step_tokens must be at least 2, not {self.max_step_tokens}")
        if self.chunked_prefill_size < 0:
            raise ValueError(f"chunked_prefill_size is {self.chunked_prefill_size}; 0 turns it off")
        if self.max_itl is not None and not (self.max_itl > 0 and self.chunked_prefill_size):
            raise ValueError(f"max_itl {self.max_itl} must be positive, and whole prompts break it")


def chunk_length(remaining: int, chunk: int, left: int, *, is_first: bool) -> int:
    """How much of a prompt with `remaining` tokens goes into a step that has `left` tokens to give.

    With `chunk` 0 a prompt goes whole or waits (0), except that the first prompt of a step
    (`is_first`) is cut if it must be: no later step would have more room for it.
    """
    if chunk:
        return min(remaining, chunk, left)
    if remaining <= left:
        return remaining
    return left if is_first else 0


class Growth:
    """How many tokens admission expects every running request to generate still.

    A request is admitted if, after its prompt, the pool can give each running request
    min(what it may still generate, `tokens`) more. Too little costs retractions, too much leaves the
    pool idle; so the number doubles with each retraction and shrinks by 1/16 with each request that
    finishes. Requests that may generate less than this are never admitted into a retraction.
    """

    def __init__(self, tokens: int = 64) -> None:
        self.tokens = tokens

    def after_retraction(self) -> None:
        self.tokens = min(self.tokens * 2, MAX_GROWTH)

    def after_finish(self) -> None:
        self.tokens = max(self.tokens - self.tokens // 16, MIN_GROWTH)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)
