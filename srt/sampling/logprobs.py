"""Log-probabilities as they travel: of raw logits, and of what a token was drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.sample.race import BLOCK, token_weights
from kernels.sample.truncate import Truncation, keep_likely
from srt.wire.params import LogprobEntry, TokenLogprobs


@dataclass(slots=True, kw_only=True)
class Wanted:
    """The rows of a batch that ask for log-probabilities of one mode: their places, and how many of the
    most likely tokens each wants."""

    places: list[int]
    index: torch.Tensor  # the same, [P] int64
    nums: list[int]


@dataclass(slots=True, kw_only=True)
class WantedProcessed(Wanted):
    """The P rows that ask for processed ones. `cut` index these P: rows with a truncation rule."""

    inverse_temperature: torch.Tensor  # [P, 1] float32; 1 for greedy rows
    cut: list[int]
    rules: Truncation  # of the rows in `cut`


def drawn_logits(
    logits: torch.Tensor, peaks: torch.Tensor, wanted: WantedProcessed
) -> torch.Tensor:
    """Logits of the distribution that each wanted row is drawn from, [P, V]: divided by temperature,
    minus infinity where truncation leaves nothing. logits: [S, V], all other rules applied; peaks: [S],
    their largest. Keeps the very tokens that `draw_truncated` may draw."""
    rows, tops = logits[wanted.index], peaks[wanted.index]
    scaled = (rows - tops[:, None]) * wanted.inverse_temperature
    if wanted.cut:
        cut = wanted.cut
        weights = token_weights(rows[cut], tops[cut], wanted.inverse_temperature[cut])
        _, kept, _ = keep_likely(weights, wanted.rules, weights.shape[1])
        is_out = kept.flatten(1)[:, : logits.shape[1]] == 0
        scaled[cut] = scaled[cut].masked_fill(is_out, float("-inf"))
    return scaled


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, nums: list[int]
) -> list[TokenLogprobs]:
    """For each row of logits [n, V]: log-softmax at `tokens` [n] int64, and the `nums[i]` largest,
    best first. Nothing is changed."""
    if not nums:
        return []
    return list_logprobs(*measure(logits, tokens, max(nums)), tokens.tolist(), nums)


def measure(
    logits: torch.Tensor, tokens: torch.Tensor, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax of each row of logits [n, V] at its token, then the `num` largest (V if there are no
    more), best first: [n, 1 + num] float32; and the ids of those, [n, num] int64. Waits for nothing."""
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    values, ids = largest(logits, min(num, logits.shape[1]))
    return torch.cat([chosen, values], dim=1) - total, ids


def largest(logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk` of each row. They stand in the `num` blocks of the vocabulary with the largest peaks, or
    behind the last whole block; finding those takes one pass over a row."""
    whole = logits.shape[1] // BLOCK * BLOCK
    if num == 0 or whole <= num * BLOCK:
        values, ids = logits.topk(num, dim=-1)
        return values, ids
    blocks = torch.unflatten(logits[:, :whole], 1, (whole // BLOCK, BLOCK))
    best = blocks.amax(-1).topk(num, dim=-1).indices
    inside = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    within = torch.arange(BLOCK, device=logits.device)
    known = (best[:, :, None] * BLOCK + within).flatten(1)
    if whole < logits.shape[1]:
        rest = torch.arange(whole, logits.shape[1], device=logits.device)
        inside = torch.cat([inside, logits[:, whole:]], dim=1)
        known = torch.cat([known, rest.expand(len(logits), -1)], dim=1)
    values, places = inside.topk(num, dim=-1)
    return values, known.gather(1, places)


def list_logprobs(
    values: torch.Tensor, ids: torch.Tensor, tokens: list[int], nums: list[int]
) -> list[TokenLogprobs]:
    """What `measure` found for `tokens`, as it travels; `nums[i]` of the best for row i."""
    return [
        TokenLogprobs(
            chosen=LogprobEntry(token=token, logprob=found[0]),
            top=[
                LogprobEntry(token=other, logprob=value)
                for other, value in zip(best[:num], found[1 : 1 + num], strict=True)
            ],
        )
        for token, found, best, num in zip(tokens, values.tolist(), ids.tolist(), nums, strict=True)
    ]
