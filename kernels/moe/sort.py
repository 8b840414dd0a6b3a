# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""The entries (token, expert) of every expert side by side, in blocks that a product takes whole.

What is sorted is the entries whose experts are among `num_experts` from `first_expert` on: sorted, int32
[num_entries], has those of the first of these experts in their order, then those of the next. blocks,
int32 [num_blocks, 4], has no more than TILE of them that have one expert: its number from `first_expert`
on, first place, place behind the last; an expert of -1, behind all others, is nothing. num_blocks is
num_entries / TILE + num_experts, which is enough however they are spread. EXPERTS is a power of two, not
less than num_experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def find_experts(experts_ptr, entries, num_entries, first_expert, num_experts):
    """From `first_expert` on; -1 is none of them."""
    expert = tl.load(experts_ptr + entries, mask=entries < num_entries, other=-1) - first_expert
    return tl.where((expert >= 0) & (expert < num_experts), expert, -1)


@triton.jit
def count_entries(
    experts_ptr,
    counts_ptr,
    num_entries,
    first_expert,
    num_experts,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """experts: int32 [num_entries], CHUNK for each program; counts: int32 [programs, EXPERTS]."""
    own = tl.program_id(0)
    entries = own * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not earlier: `sort_entries` reads experts before its own wait
    expert = find_experts(experts_ptr, entries, num_entries, first_expert, num_experts)
    counts = tl.histogram(expert, EXPERTS, mask=expert >= 0)
    tl.store(counts_ptr + own * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit
def sort_entries(
    experts_ptr,
    counts_ptr,
    sorted_ptr,
    blocks_ptr,
    num_entries,
    num_blocks,
    first_expert,
    num_experts,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    SEEN: tl.constexpr,  # rows of counts that are looked at together
    PDL: tl.constexpr,
):
    """Right behind `count_entries`, whose grid and counts it has."""
    own = tl.program_id(0)
    chunks = tl.num_programs(0)
    index = tl.arange(0, CHUNK)
    experts = tl.arange(0, EXPERTS)
    if PDL:
        gdc_launch_dependents()
    entries = own * CHUNK + index
    expert = find_experts(experts_ptr, entries, num_entries, first_expert, num_experts)
    rank = tl.zeros([CHUNK], tl.int32)
    # Sums go along the first axis, which lies within threads and not across them.
    for at in range(0, CHUNK, 64):
        before = at + tl.arange(0, 64)
        other = find_experts(
            experts_ptr, own * CHUNK + before, num_entries, first_expert, num_experts
        )
        is_before = (other[:, None] == expert[None, :]) & (before[:, None] < index[None, :])
        rank += tl.sum(is_before.to(tl.int32), 0)
    if PDL:
        gdc_wait()
    total = tl.zeros([EXPERTS], tl.int32)
    place = tl.zeros([EXPERTS], tl.int32)
    for at in range(0, chunks, SEEN):
        row = at + tl.arange(0, SEEN)
        count_at = counts_ptr + row[:, None] * EXPERTS + experts[None, :]
        counts = tl.load(count_at, mask=(row < chunks)[:, None], other=0)
        total += tl.sum(counts, 0)
        place += tl.sum(tl.where((row < own)[:, None], counts, 0), 0)
    last = tl.cumsum(total, 0)
    first = last - total
    place += first
    rank += tl.gather(place, tl.maximum(expert, 0), 0)
    tl.store(sorted_ptr + rank, entries, mask=expert >= 0)
    blocks = (total + TILE - 1) // TILE
    end = tl.cumsum(blocks, 0)
    begin = end - blocks
    for at in range(own * 16, num_blocks, chunks * 16):
        block = at + tl.arange(0, 16)
        is_its = (begin[:, None] <= block[None, :]) & (block[None, :] < end[:, None])
        owner = tl.sum(tl.where(is_its, experts[:, None] + 1, 0), 0) - 1
        shift = tl.sum(tl.where(is_its, (first - begin * TILE)[:, None], 0), 0)
        behind = tl.sum(tl.where(is_its, last[:, None], 0), 0)
        start = shift + block * TILE
        is_there = block < num_blocks
        tl.store(blocks_ptr + block * 4, owner, mask=is_there)
        tl.store(blocks_ptr + block * 4 + 1, start, mask=is_there)
        tl.store(blocks_ptr + block * 4 + 2, tl.minimum(start + TILE, behind), mask=is_there)


@triton.jit
def sort_few_entries(
    experts_ptr,
    sorted_ptr,
    blocks_ptr,
    num_entries,
    num_blocks,
    first_expert,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,  # not less than num_entries
    EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program looks at all of them for its expert. grid: [num_experts]."""
    own = tl.program_id(0)
    num_experts = tl.num_programs(0)
    entries = tl.arange(0, CHUNK)
    experts = tl.arange(0, EXPERTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = find_experts(experts_ptr, entries, num_entries, first_expert, num_experts)
    counts = tl.histogram(expert, EXPERTS, mask=expert >= 0)
    blocks = (counts + TILE - 1) // TILE
    first = tl.sum(tl.where(experts < own, counts, 0), 0)
    last = first + tl.sum(tl.where(experts == own, counts, 0), 0)
    block = tl.sum(tl.where(experts < own, blocks, 0), 0)
    end = block + (last - first + TILE - 1) // TILE
    if own == num_experts - 1:
        end = num_blocks
    index = tl.arange(0, 64)
    for at in range(block, end, 64):
        begin = first + (at - block + index) * TILE
        is_own = at + index < end
        block_at = blocks_ptr + (at + index) * 4
        tl.store(block_at, tl.where(begin < last, own, -1), mask=is_own)
        tl.store(block_at + 1, begin, mask=is_own)
        tl.store(block_at + 2, tl.minimum(begin + TILE, last), mask=is_own)
    is_mine = expert == own
    rank = tl.cumsum(is_mine.to(tl.int32), 0)
    tl.store(sorted_ptr + first + rank - 1, entries, mask=is_mine)
