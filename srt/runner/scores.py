"""Log-probabilities of given tokens: what a request with `prompt_logprobs` asks for."""

from __future__ import annotations

from typing import Protocol

import torch

from srt.protocols.forward_batch import Slice
from srt.wire.params import TokenLogprobs

SCORED_AT_ONCE = 128  # prompt rows whose logits exist at the same time


class Scorer(Protocol):
    def score(
        self, logits: torch.Tensor, targets: torch.Tensor, num_top: int
    ) -> list[TokenLogprobs]: ...


class HasLogits(Protocol):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def score_slices(
    runner: HasLogits, scorer: Scorer, slices: list[Slice], hidden: torch.Tensor
) -> list[list[TokenLogprobs] | str]:
    """Per slice the logprobs of its targets, or why there are none. hidden: one row for each target,
    slice after slice. Waits for the device."""
    found: list[list[TokenLogprobs] | str] = []
    first = 0
    for piece in slices:
        assert piece.prompt_logprobs is not None
        last = first + len(piece.targets)
        found.append(
            _score(runner, scorer, hidden[first:last], piece.targets, piece.prompt_logprobs)
        )
        first = last
    return found


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
