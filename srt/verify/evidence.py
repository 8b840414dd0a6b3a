"""What took place while a variant ran: an engine that never used its cache proves nothing about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from srt.verify.driver import Driver, Outcome

WORDS: Mapping[str, str] = MappingProxyType(
    {
        "steps": "steps",
        "shared": "of them shared",
        "cuts": "cuts in prompts",
        "cached": "tokens from the cache",
        "drafted": "guesses",
        "accepted": "of them right",
        "retractions": "retractions",
        "pieces": "pieces of text",
    }
)


def count(outcomes: Sequence[Outcome], driver: Driver) -> dict[str, int]:
    """By the names of WORDS. `driver` ran all of them and nothing else."""
    ends = [outcome.end for outcome in outcomes]
    return {
        "steps": driver.watched.num_steps,
        "shared": driver.watched.num_shared,
        "cuts": driver.watched.num_cuts,
        "cached": sum(end.usage.cached_tokens for end in ends),
        "drafted": sum(end.usage.drafted_tokens for end in ends),
        "accepted": sum(end.usage.accepted_tokens for end in ends),
        "retractions": sum(end.timing.retractions for end in ends if end.timing),
        "pieces": sum(len(outcome.pieces) for outcome in outcomes),
    }


def describe(counts: Mapping[str, int], about: str | None) -> str:
    """The counts in words; first of all if what the run is `about` never took place."""
    lack = "" if about is None or counts[about] else f"proves nothing: 0 {WORDS[about]}, "
    return lack + ", ".join(f"{n} {WORDS[name]}" for name, n in counts.items() if n)
