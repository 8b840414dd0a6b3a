"""Drawing a token from weights, over blocks of the vocabulary.

The vocabulary is cut into blocks of 64 consecutive ids. Whatever is first done per block and then in
one block touches the whole vocabulary only in cheap reductions.
"""

from __future__ import annotations

import torch

from kernels.sample.noise import exponential

BLOCK = 64
BLOCK_COUNTERS = 1 << 40  # noise counters of blocks start here; those of tokens are their ids


def token_weights(
    logits: torch.Tensor, peaks: torch.Tensor, inverse_temperature: torch.Tensor
) -> torch.Tensor:
    """exp((logit - peak) / temperature) in blocks: [R, V] -> [R, blocks, 64] float32, zero behind the
    last id. `peaks` is each row's largest logit, [R]; `inverse_temperature` [R, 1]. The largest weight
    of a row is 1."""
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // BLOCK)
    weights = torch.empty(num_rows, num_blocks * BLOCK, dtype=torch.float32, device=logits.device)
    weights[:, vocab_size:] = 0
    part = weights[:, :vocab_size]
    torch.sub(logits, peaks[:, None], out=part)
    part.mul_(inverse_temperature).exp_()
    return weights.view(num_rows, num_blocks, BLOCK)


def draw(weights: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One token a row, with probability proportional to its weight; [R] int64.

    weights: [R, N, 64] float32, those of the blocks with ids `blocks` [R, N] int64; blocks left out
    count as zero. keys: [R], from `position_keys`.

    An exponential race (the same law as Gumbel-max): the item with the largest weight / E wins, E being
    standard exponential noise of its own. Run once between blocks, by their masses, and once between
    the tokens of the winner: P(block) * P(token | block). Noise belongs to block and token ids, so
    neither the order of blocks nor zero blocks change the outcome.
    """
    masses = weights.sum(-1).double()
    winner = (masses / exponential(keys, blocks + BLOCK_COUNTERS)).argmax(-1, keepdim=True)
    first_ids = blocks.gather(1, winner) * BLOCK
    inside = weights.gather(1, winner[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    ids = first_ids + torch.arange(BLOCK, device=weights.device)
    place = (inside.double() / exponential(keys, ids)).argmax(-1)
    return first_ids[:, 0] + place
