"""One sample on its way: what came so far, and what every answer shape needs of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from srt.wire.messages import Output
from srt.wire.params import Finish, TokenLogprobs, Usage


@dataclass(slots=True, kw_only=True)
class Prompt:
    """What the engine said about one prompt. The texts are there with echo only."""

    num_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] | None = None
    first_token: str = ""  # the text of the first token, which has no logprob entry


@dataclass(slots=True, kw_only=True)
class Choice:
    index: int
    prompt: Prompt
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_echoed: bool = False
    finish: Finish | None = None

    def take(self, item: Output, keep: bool) -> None:
        """Note what came; `keep` gathers text and logprobs for an answer in one piece."""
        if item.prompt_logprobs is not None:
            self.prompt.logprobs = item.prompt_logprobs
        self.token_ids.extend(item.token_ids)
        if item.finish is not None:
            self.finish = item.finish
        if keep:
            self.texts.append(item.text)
            self.logprobs.extend(item.logprobs or ())

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def usage(self) -> Usage:
        """The engine's count when finished; until then what was seen."""
        if self.finish is not None:
            return self.finish.usage
        return Usage(prompt_tokens=self.prompt.num_tokens, completion_tokens=len(self.token_ids))

    @property
    def reason(self) -> str | None:
        return self.finish.reason if self.finish is not None else None


def keep_best(choices: list[Choice], n: int, num: int) -> list[Choice]:
    """Of every prompt's `n` samples the `num` whose tokens are the likeliest on average, best first,
    numbered anew. A sample without a token is last; of equal ones the earlier is better."""
    kept: list[Choice] = []
    for first in range(0, len(choices), n):
        ranked = sorted(choices[first : first + n], key=_mean_logprob, reverse=True)
        kept += ranked[:num]
    return [replace(choice, index=index) for index, choice in enumerate(kept)]


def _mean_logprob(choice: Choice) -> float:
    values = [entry.chosen.logprob for entry in choice.logprobs]
    return sum(values) / len(values) if values else -math.inf


def count_usage(choices: list[Choice], n: int) -> dict[str, Any]:
    """Usage of a whole answer: a prompt counts once however many samples it has, and so do its
    cached tokens, which are those of its first sample: the others find the first one's work."""
    heads = choices[::n]
    prompt_tokens = sum(choice.prompt.num_tokens for choice in heads)
    completion_tokens = sum(choice.usage.completion_tokens for choice in choices)
    cached = sum(min(head.usage.cached_tokens, head.prompt.num_tokens) for head in heads)
    drafted = sum(choice.usage.drafted_tokens for choice in choices)
    accepted = sum(choice.usage.accepted_tokens for choice in choices)
    details = {"reasoning_tokens": 0}
    if drafted:
        details |= {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": details,
    }


def report(choices: list[Choice], wanted: frozenset[str]) -> dict[str, Any]:
    """The vendor key: one entry per finished choice; nothing if nothing was asked for."""
    if not wanted:
        return {}
    return {"tandem": {"choices": [_report(choice, wanted) for choice in choices]}}


def _report(choice: Choice, wanted: frozenset[str]) -> dict[str, Any]:
    body: dict[str, Any] = {"index": choice.index}
    finish = choice.finish
    if finish is None:
        return body
    if "stop" in wanted:
        body["matched_stop"] = finish.matched
    if "timings" in wanted:
        body["timings"] = timings(finish)
    if "cache" in wanted:
        body["cache"] = cache(finish)
    if "token_ids" in wanted:
        body["token_ids"] = choice.token_ids
    return body


def timings(finish: Finish) -> dict[str, Any] | None:
    """Seconds, as the scheduler measured them."""
    found = finish.timing
    if found is None:
        return None
    return {
        "queue": found.queue,
        "prefill": found.prefill,
        "decode": found.decode,
        "retractions": found.retractions,
    }


def cache(finish: Finish) -> dict[str, Any] | None:
    """Where the prefix match ended and why."""
    found = finish.cache
    if found is None:
        return None
    return {
        "matched_tokens": found.matched_tokens,
        "position": found.position,
        "reason": found.reason,
        "ours": found.ours,
        "theirs": found.theirs,
    }
