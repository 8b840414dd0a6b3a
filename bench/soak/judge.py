"""Is this answer right? Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from bench.soak.plan import Errand, Library

REFUSALS = ("invalid_value", "context_length_exceeded", "request_too_large")


@dataclass(slots=True)
class Outcome:
    """What the caller saw. `error` is a code of `srt.errors`, or what broke. `has_ended`: the answer
    came to its own end, however it ended."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)  # every finish reason of every sample
    error: str | None = None
    has_ended: bool = False
    num_tokens: int = 0

    def add(self, index: int, text: str, reason: str | None) -> None:
        self.texts[index] = self.texts.get(index, "") + text
        if reason is not None:
            self.ends.setdefault(index, []).append(reason)


def classify(errand: Errand, outcome: Outcome) -> str:
    """One word for the table."""
    if errand.is_bad:
        return "refused"
    if outcome.error == "queue_full":
        return "busy"
    if not outcome.has_ended:
        return errand.cut or "broken"
    reasons = Counter(reason for ends in outcome.ends.values() for reason in ends)
    return "aborted" if outcome.error == "aborted" or reasons["abort"] else "finished"


def judge(errand: Errand, outcome: Outcome, library: Library | None) -> list[str]:
    """What is wrong with it; empty if nothing is. `library` knows the texts of a scripted engine."""
    found: list[str] = []
    if errand.is_bad:
        if outcome.error not in REFUSALS:
            found.append(f"a bad request was not refused: {outcome.error}, {outcome.ends}")
        return _named(errand, found)
    if outcome.error == "queue_full":  # again and again, or the caller had not given up
        return _named(errand, ["found the queue full until its caller gave up"])
    if outcome.error is not None and not (outcome.error == "aborted" and errand.cut == "abort"):
        found.append(f"ended in {outcome.error}")
    if not errand.cut and not outcome.has_ended:
        found.append("never came to an end")
    for index, ends in outcome.ends.items():
        if len(ends) > 1:
            found.append(f"sample {index} ended {len(ends)} times: {ends}")
        allowed = ("stop", "length", "abort") if errand.cut == "abort" else ("stop", "length")
        if not set(ends) <= set(allowed):
            found.append(f"sample {index} ended with {ends}")
    if set(outcome.texts) - set(range(errand.n)):
        found.append(f"samples {sorted(outcome.texts)} came, {errand.n} were asked for")
    if outcome.has_ended and outcome.error is None and len(outcome.ends) != errand.n:
        found.append(f"{len(outcome.ends)} of {errand.n} samples ended")
    if library is not None:
        found += _compare(errand, outcome, library)
    return _named(errand, found)


def _compare(errand: Errand, outcome: Outcome, library: Library) -> list[str]:
    text, reason = library.answer(errand)
    found = []
    for index, got in outcome.texts.items():
        ends = outcome.ends.get(index, [])
        if ends and ends[0] != "abort":
            if (got, ends[0]) != (text, reason):
                found.append(f"sample {index}: {ends[0]} {got!r} instead of {reason} {text!r}")
        elif not text.startswith(got):
            found.append(f"sample {index}: {got!r} is no beginning of {text!r}")
    return found


def _named(errand: Errand, found: list[str]) -> list[str]:
    how = "stream" if errand.stream else "whole"
    kind = "chat" if errand.is_chat else "text"
    return [
        f"request {errand.number} ({errand.way}, {kind}, {how}, {errand.fields}, "
        f"{errand.cut or 'no cut'}): {sentence}"[:600]
        for sentence in found
    ]
