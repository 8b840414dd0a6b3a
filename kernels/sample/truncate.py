"""top_k, top_p and min_p: which tokens may be drawn at all.

Each rule gives a least weight; a token stays if its weight is not below any of them. So tokens that are
exactly as likely as the last one a rule keeps are kept too, and no order among equals is needed.
    top_k   the k-th largest weight
    top_p   the least weight in the smallest set of most likely tokens that reaches p of the mass which
            top_k has left; at least one token
    min_p   min_p times the largest weight
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from kernels.sample.race import BLOCK, draw

NUM_BLOCKS = 64  # looked at first; enough whenever few tokens are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The rules of R rows, each [R, 1]. Off: top_k 0, top_p 1, min_p 0."""

    top_k: torch.Tensor  # int64
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float32
    max_top_k: int

    def take(self, index: torch.Tensor) -> Truncation:
        return Truncation(
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            max_top_k=self.max_top_k,
        )


def draw_truncated(weights: torch.Tensor, rules: Truncation, keys: torch.Tensor) -> torch.Tensor:
    """`kernels.sample.race.draw` among the tokens that the rules keep. weights: [R, blocks, 64]."""
    num_blocks = weights.shape[1]
    some = max(NUM_BLOCKS, rules.max_top_k)
    if some >= num_blocks:
        blocks, kept, _ = keep_likely(weights, rules, num_blocks)
        return draw(kept, blocks, keys)
    blocks, kept, is_exact = keep_likely(weights, rules, some)
    tokens = draw(kept, blocks, keys)
    if not bool(is_exact.all()):
        index = (~is_exact).nonzero()[:, 0]
        blocks, kept, _ = keep_likely(weights[index], rules.take(index), num_blocks)
        tokens[index] = draw(kept, blocks, keys[index])
    return tokens


def keep_likely(
    weights: torch.Tensor, rules: Truncation, num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Applies the rules, looking only into the `num` blocks with the largest peaks.

    Returns their ids [R, num], their weights [R, num, 64] with those not kept set to zero, and whether
    that is exact, [R] bool. It is if the least weight kept is above every peak left out: then all
    tokens down to it were seen, and ranks and sums up to it are right.
    """
    num_rows, num_blocks, _ = weights.shape
    if num == num_blocks:
        blocks = torch.arange(num_blocks, device=weights.device).expand(num_rows, -1)
        unseen = weights.new_full((num_rows, 1), -1.0)
        seen = weights
        ranked = _rank_whole_rows(weights.flatten(1), rules)
    else:
        peaks, order = weights.amax(-1).topk(num + 1)
        blocks, unseen = order[:, :num], peaks[:, num:]
        seen = weights.gather(1, blocks[:, :, None].expand(-1, -1, BLOCK))
        ranked = sort_descending(seen.flatten(1))
    running = ranked.double().cumsum(-1)

    has_top_k = rules.top_k > 0
    last = (rules.top_k - 1).clamp(0, ranked.shape[1] - 1)
    by_top_k = torch.where(has_top_k, ranked.gather(1, last), 0.0)

    num_left = (ranked >= by_top_k).sum(-1, keepdim=True)
    left = running.gather(1, (num_left - 1).clamp_min(0))
    whole = weights.sum(-1).double().sum(-1, keepdim=True)
    wanted = rules.top_p * torch.where(has_top_k, left, whole)
    place = (running < wanted).sum(-1, keepdim=True)
    reached = (rules.top_p < 1.0) & (place < ranked.shape[1])
    by_top_p = torch.where(reached, ranked.gather(1, place.clamp_max(ranked.shape[1] - 1)), 0.0)

    by_min_p = rules.min_p * ranked[:, :1]
    least = torch.maximum(torch.maximum(by_top_k, by_top_p), by_min_p)
    is_exact = (least > unseen) & (~has_top_k | (by_top_k > unseen))
    return blocks, torch.where(seen >= least[:, :, None], seen, 0.0), is_exact[:, 0]


def _rank_whole_rows(weights: torch.Tensor, rules: Truncation) -> torch.Tensor:
    """The weights of each row of [R, N], best first, without most of those no rule would keep; padded
    with zeros to equal length.

    All tokens below (1 - p) * mass / N together weigh less than (1 - p) * mass, so the set that reaches
    p needs none of them. Rows with top_k are ranked as they are.
    """
    mass = weights.sum(-1, keepdim=True)
    floor = torch.maximum((1 - rules.top_p) * mass / weights.shape[1], rules.min_p.double())
    floor = torch.where(rules.top_k > 0, 0.0, floor * (1 - 1e-4))  # a margin for rounding
    rows = [row[row >= least] for row, least in zip(weights, floor, strict=True)]
    return sort_descending(pad_sequence(rows, batch_first=True))


def sort_descending(values: torch.Tensor) -> torch.Tensor:
    """[R, N] float32, each row sorted. On a CPU through numpy, whose vector sort of bare values is
    several times as fast as one that carries indices along."""
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    ranked = values.neg().numpy()
    ranked.sort(axis=-1)
    return torch.from_numpy(ranked).neg_()
