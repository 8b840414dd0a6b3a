"""The definition of right, in plain torch. May wait for its device."""

from __future__ import annotations

import torch

from kernels.best_token import composed
from kernels.sample.noise import position_keys
from kernels.sample.race import draw, token_weights
from kernels.sample.table import (
    GENERATED,
    INVERSE_TEMPERATURE,
    KEY,
    MIN_P,
    TOP_K,
    TOP_P,
    Drawn,
    reals,
)
from kernels.sample.truncate import Truncation, keep_likely


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    drawn: Drawn,
    offsets: torch.Tensor | None = None,
) -> None:
    num = len(drawn)
    index = rows[:num].long()
    lines = logits[:num].float()
    state = table[index]
    peaks, tokens = composed.best_token(lines)
    drawn.peaks.copy_(peaks)
    drawn.floors.fill_(float("-inf"))
    drawn.tokens.copy_(torch.where(peaks.isfinite(), tokens, 0))
    positions = state[:, GENERATED] if offsets is None else state[:, GENERATED] + offsets
    keys = position_keys(state[:, KEY], positions)
    inverse = reals(state, INVERSE_TEMPERATURE)
    top_p, min_p = reals(state, TOP_P), reals(state, MIN_P)
    is_cut = (state[:, TOP_K] > 0) | (top_p < 1) | (min_p > 0)
    is_drawn = (inverse > 0) & peaks.isfinite()
    for cuts in (False, True):
        places = (is_drawn & (is_cut == cuts)).nonzero()[:, 0]
        if not len(places):
            continue
        part = lines[places]
        weights = token_weights(part, peaks[places], inverse[places, None].float())
        blocks = torch.arange(weights.shape[1], device=weights.device).expand(len(places), -1)
        if cuts:
            rules = Truncation(
                top_k=state[places, TOP_K, None],
                top_p=top_p[places, None],
                min_p=min_p[places, None].float(),
                max_top_k=0,
            )
            _, weights, _ = keep_likely(weights, rules, weights.shape[1])
            is_out = weights.flatten(1)[:, : part.shape[1]] == 0
            drawn.floors[places] = part.masked_fill(is_out, float("inf")).amin(-1)
        drawn.tokens[places] = draw(weights, blocks, keys[places])
    if offsets is None:
        table[index, GENERATED] += 1
