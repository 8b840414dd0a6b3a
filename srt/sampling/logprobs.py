"""Log-probabilities of raw logits, as they travel."""

from __future__ import annotations

import torch

from srt.wire.params import LogprobEntry, TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, nums: list[int]
) -> list[TokenLogprobs]:
    """For each row of raw logits [n, V]: log-softmax at `tokens` [n] int64, and the `nums[i]` largest,
    best first. Nothing is changed."""
    if not nums:
        return []
    total = logits.logsumexp(-1, keepdim=True)
    chosen = (logits.gather(1, tokens[:, None]) - total)[:, 0].tolist()
    values, ids = logits.topk(min(max(nums), logits.shape[1]), dim=-1)
    best = (values - total).tolist()
    best_ids = ids.tolist()
    return [
        TokenLogprobs(
            chosen=LogprobEntry(token=token, logprob=logprob),
            top=[
                LogprobEntry(token=other, logprob=value)
                for other, value in zip(best_ids[place][:num], best[place][:num], strict=True)
            ],
        )
        for place, (token, logprob, num) in enumerate(
            zip(tokens.tolist(), chosen, nums, strict=True)
        )
    ]
