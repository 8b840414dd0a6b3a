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


def accept_chain(
    drawn: Drawn,
    firsts: torch.Tensor,
    guesses: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    depth = guesses.shape[1]
    accepted.fill_(-1)
    accepted[:, 2] = drawn.peaks[firsts].double().view(torch.int64)
    tokens, is_sound = drawn.tokens.tolist(), drawn.peaks.isfinite().tolist()
    for place, (first, guessed) in enumerate(zip(firsts.tolist(), guesses.tolist(), strict=True)):
        run = [tokens[first]]
        while len(run) <= depth and is_sound[first] and guessed[len(run) - 1] == run[-1]:
            line = first + len(run)
            if not is_sound[line]:
                break
            run.append(tokens[line])
        accepted[place, 0], accepted[place, 1] = len(run), run[-1]
        accepted[place, 3 : 3 + len(run)] = torch.tensor(run, device=accepted.device)
        table[int(rows[place]), GENERATED] += len(run)
