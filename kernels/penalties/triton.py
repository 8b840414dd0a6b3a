"""Penalties on the GPU: a block per (line, tile of the vocabulary) reads the counts, and touches the
logits of tokens that were seen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher
from kernels.penalties import PROMPT, Penalties

TILE = 4096


@triton.jit
def penalize_tiles(
    logits_ptr,
    places_ptr,
    slots_ptr,
    rates_ptr,
    seen_ptr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    PROMPT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [tiles, P]."""
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    line = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seen = seen_ptr + tl.load(slots_ptr + line) * VOCAB + ids
    found = tl.load(seen, mask=ids < VOCAB, other=0)
    is_seen = found != 0
    at = logits_ptr + tl.load(places_ptr + line) * VOCAB + ids
    repetition = tl.load(rates_ptr + line * 3)
    presence = tl.load(rates_ptr + line * 3 + 1)
    frequency = tl.load(rates_ptr + line * 3 + 2)
    values = tl.load(at, mask=is_seen, other=0.0)
    counts = (found & (PROMPT - 1)).to(tl.float32)
    values = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values -= frequency * counts + tl.where(counts > 0, presence, 0.0)
    tl.store(at, values, mask=is_seen)


@triton.jit
def remember_tokens(
    tokens_ptr,
    places_ptr,
    slots_ptr,
    history_ptr,
    lengths_ptr,
    seen_ptr,
    width,
    VOCAB: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [P]. history: [slots, width]."""
    line = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + line)
    token = tl.load(tokens_ptr + tl.load(places_ptr + line))
    length = tl.load(lengths_ptr + slot)
    tl.store(history_ptr + slot * width + length, token)
    tl.store(lengths_ptr + slot, length + 1)
    count = seen_ptr + slot * VOCAB + token
    tl.store(count, tl.load(count) + 1)


def bind() -> Penalties:
    launch_tiles, launch_tokens = Launcher(penalize_tiles), Launcher(remember_tokens)

    def penalize(
        logits: torch.Tensor,
        places: torch.Tensor,
        slots: torch.Tensor,
        rates: torch.Tensor,
        history: torch.Tensor,
        seen: torch.Tensor,
    ) -> None:
        vocab_size = logits.shape[1]
        grid = (-(-vocab_size // TILE), len(places), 1)
        if len(places):
            launch_tiles(grid, (logits, places, slots, rates, seen), (), (vocab_size, TILE, PROMPT))

    def remember(
        tokens: torch.Tensor,
        places: torch.Tensor,
        slots: torch.Tensor,
        history: torch.Tensor,
        lengths: torch.Tensor,
        seen: torch.Tensor,
    ) -> None:
        if len(places):
            launch_tokens(
                (len(places), 1, 1),
                (tokens, places, slots, history, lengths, seen),
                (history.shape[1],),
                (seen.shape[1],),
                num_warps=1,
            )

    return Penalties(penalize, remember)
