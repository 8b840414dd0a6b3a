"""Batches of a corpus: rows of like lengths, padded at their ends, in random order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.transfer import send
from srt.spec.train.corpus import Corpus

LENGTH_STEP = 64  # lengths are rounded up to this: few shapes, few allocations
POOL = 8192  # sequences that are sorted by length together


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens [B, T] int64 on the device; `places`: flat indices of positions that predict an answer's
    token. `rows` are the sequences' numbers in the corpus."""

    rows: list[int]
    tokens: torch.Tensor
    places: torch.Tensor


def draw_batches(corpus: Corpus, max_tokens: int, rng: random.Random) -> Iterator[Batch]:
    """Endless, epoch after epoch. A batch has at most `max_tokens` positions, padding included."""
    order = list(range(len(corpus)))
    while True:
        rng.shuffle(order)
        for first in range(0, len(order), POOL):
            groups = list(_group(corpus, order[first : first + POOL], max_tokens))
            rng.shuffle(groups)
            for rows in groups:
                yield make_batch(corpus, rows)


def all_batches(corpus: Corpus, max_tokens: int) -> Iterator[Batch]:
    """Every sequence once."""
    for rows in _group(corpus, list(range(len(corpus))), max_tokens):
        yield make_batch(corpus, rows)


def make_batch(corpus: Corpus, rows: list[int]) -> Batch:
    device = corpus.tokens.device
    length = _round_up(max(corpus.lengths[row] for row in rows))
    starts = torch.tensor([corpus.starts[row] for row in rows])[:, None]
    lengths = torch.tensor([corpus.lengths[row] for row in rows])[:, None]
    prompts = torch.tensor([corpus.prompt_lengths[row] for row in rows])[:, None]
    place = torch.arange(length)
    index = starts + torch.minimum(place, lengths - 1)  # padding repeats the last token
    places = ((place >= prompts - 1) & (place < lengths - 1)).flatten().nonzero()[:, 0]
    tokens = corpus.tokens[send(index, device)].long()
    return Batch(rows, tokens, send(places, device))


def _group(corpus: Corpus, rows: list[int], max_tokens: int) -> Iterator[list[int]]:
    group: list[int] = []
    longest = 0
    for row in sorted(rows, key=lambda row: corpus.lengths[row]):
        longest = max(longest, _round_up(corpus.lengths[row]))
        if group and (len(group) + 1) * longest > max_tokens:
            yield group
            group, longest = [], _round_up(corpus.lengths[row])
        group.append(row)
    if group:
        yield group


def _round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP
