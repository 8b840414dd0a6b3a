"""Two runs of the same requests: where do the answers part?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from srt.verify.driver import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first one of a request. `position` counts output tokens; `expected` or `found` None: one of
    the answers ended there. `gap`: by how much the likeliest token's logit led the second there in the
    expected run; None if that is not known."""

    uid: int
    position: int
    expected: int | None
    found: int | None
    gap: float | None
    what: str  # tokens, end, text


def find_differences(
    found: Mapping[int, Outcome], expected: Mapping[int, Outcome]
) -> list[Difference]:
    """One for each request of `found` whose tokens, end or text (where both have one) are others."""
    pairs = ((uid, outcome, expected[uid]) for uid, outcome in found.items())
    return [each for pair in pairs if (each := find_difference(*pair)) is not None]


def find_difference(uid: int, found: Outcome, expected: Outcome) -> Difference | None:
    ours, theirs = found.tokens, expected.tokens
    position = next(
        (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    if len(ours) != len(theirs) or position < len(ours):
        what = "tokens"
    elif _end(found) != _end(expected):
        what = "end"
    elif found.text != expected.text:
        what = "text"
    else:
        return None
    return Difference(
        uid=uid,
        position=position,
        expected=theirs[position] if position < len(theirs) else None,
        found=ours[position] if position < len(ours) else None,
        gap=_gap(expected, position),
        what=what,
    )


def _end(outcome: Outcome) -> tuple[object, ...]:
    end = outcome.end
    usage = end.usage
    return end.reason, end.matched, end.failure, usage.prompt_tokens, usage.completion_tokens


def _gap(outcome: Outcome, position: int) -> float | None:
    if position >= len(outcome.logprobs) or len(outcome.logprobs[position].top) < 2:
        return None
    first, second = outcome.logprobs[position].top[:2]
    return first.logprob - second.logprob
