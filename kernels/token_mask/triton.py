"""On the GPU: a block per (line, tile of the vocabulary) writes what is forbidden and reads no logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import Launcher
from kernels.token_mask import Forbid

TILE = 4096


@triton.jit
def forbid_tiles(
    logits_ptr,
    places_ptr,
    masks_ptr,
    VOCAB: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [tiles, P]."""
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    line = tl.program_id(1).to(tl.int64)
    held = ids < VOCAB
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    packed = tl.load(masks_ptr + line * NUM_BYTES + ids // 8, mask=held, other=0)
    is_forbidden = ((packed.to(tl.int32) >> (ids % 8)) & 1) == 0
    at = logits_ptr + tl.load(places_ptr + line) * VOCAB + ids
    tl.store(at, tl.full((TILE,), float("-inf"), tl.float32), mask=held & is_forbidden)


def bind() -> Forbid:
    launch = Launcher(forbid_tiles)

    def forbid(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
        vocab_size, num_bytes = logits.shape[1], masks.shape[1]
        if len(places):
            grid = (-(-vocab_size // TILE), len(places), 1)
            launch(grid, (logits, places, masks), (), (vocab_size, num_bytes, TILE))

    return forbid
