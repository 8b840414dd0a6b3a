"""Log-probabilities of given tokens, what a request with `prompt_logprobs` asks for, and how they join
what its slice sampled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from srt.protocols.forward_batch import Slice, SliceResult
from srt.wire.params import TokenLogprobs

Scores = list[list[TokenLogprobs] | str]  # per slice that asks: its logprobs, or why there are none

SCORED_AT_ONCE = 128  # prompt rows whose logits exist at the same time


class Scorer(Protocol):
    def score(
        self, logits: torch.Tensor, targets: torch.Tensor, num_top: int
    ) -> list[TokenLogprobs]: ...


class HasLogits(Protocol):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def score_slices(
    runner: HasLogits, scorer: Scorer, slices: list[Slice], hidden: torch.Tensor
) -> Scores:
    """Per slice the logprobs of its targets, or why there are none. hidden: one row for each target,
    slice after slice. Waits for the device."""
    found: Scores = []
    first = 0
    for piece in slices:
        assert piece.prompt_logprobs is not None
        last = first + len(piece.targets)
        found.append(
            _score(runner, scorer, hidden[first:last], piece.targets, piece.prompt_logprobs)
        )
        first = last
    return found


def join_scores(
    slices: list[Slice], sampled: Iterable[SliceResult], scores: Scores
) -> list[SliceResult]:
    """A result for each slice, in order. sampled: of the slices that sample. scores: of those that have
    targets to score."""
    outcomes, scored = iter(sampled), iter(scores)
    results = []
    for piece in slices:
        result = next(outcomes) if piece.sample else SliceResult(tokens=[])
        if piece.prompt_logprobs is not None:
            found = next(scored) if piece.targets else []
            if isinstance(found, str):
                result = SliceResult(tokens=[], error=found)
            else:
                result.prompt_logprobs = found
        results.append(result)
    return results


def _score(
    runner: HasLogits, scorer: Scorer, hidden: torch.Tensor, targets: list[int], num_top: int
) -> list[TokenLogprobs] | str:
    scores: list[TokenLogprobs] = []
    for first in range(0, len(targets), SCORED_AT_ONCE):
        last = first + SCORED_AT_ONCE
        logits = runner.logits(hidden[first:last])
        if not bool(logits.isfinite().all()):
            return "the model's logits for the prompt are not finite"
        wanted = torch.tensor(targets[first:last], dtype=torch.int64, device=logits.device)
        scores += scorer.score(logits, wanted, num_top)
    return scores
