"""Inside the kernels: noise, weights, and the least weight that top_k, top_p and min_p keep.

A weight is a float32 in [0, 1], so its bits, read as an int, are in the same order as it. The least
weight kept is found by narrowing an interval of such ints: that a rule is met by "all tokens of at least
this weight" (they are k, or their mass is p) is true up to the weight sought and false above it. Eight
pivots are tried in one pass over the tokens; ten passes settle 30 bits.

Only tokens in candidate blocks are looked at: blocks of 64 ids whose largest weight is not below a
floor under the weight sought. For k tokens the k-th largest of the blocks' largest weights is such a
floor. For the mass p there are two: the weight down to which the blocks' largest alone reach p, and
(1 - p) * mass / V, as all lighter tokens together weigh less than what p leaves out.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """See `kernels.sample.noise`. The masks make an arithmetic shift a logical one."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def position_key(key, position):
    return mix(key + (position + 1) * -7046029254386353131)


@triton.jit
def exponential(key, counters):
    bits = (mix(key + (counters + 1) * -7046029254386353131) >> 12) & 0xFFFFFFFFFFFFF
    return -tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16)


@triton.jit
def weights_of(values, peak, inverse):
    return tl.exp((values - peak) * inverse.to(tl.float32))


@triton.jit
def as_weight(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_weights(
    start, candidates, num, first, peak, inverse, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """Weights and logits [CHUNK, 64] of the candidate blocks first .. first + CHUNK - 1; zero and minus
    infinity where there is none."""
    places = first + tl.arange(0, CHUNK)
    blocks = tl.load(candidates + places, mask=places < num, other=0)
    ids = blocks[:, None] * 64 + tl.arange(0, 64)[None, :]
    held = (ids < VOCAB) & (places < num)[:, None]
    values = tl.load(start + ids, mask=held, other=float("-inf")).to(tl.float32)
    return weights_of(values, peak, inverse), values, blocks


@triton.jit
def mass_above(
    start, candidates, num, least, peak, inverse, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """Of all candidates that weigh at least `least`."""
    mass = tl.zeros((CHUNK, 64), dtype=tl.float64)
    for first in range(0, num, CHUNK):
        weights, _, _ = load_weights(start, candidates, num, first, peak, inverse, VOCAB, CHUNK)
        mass += tl.where(weights >= least, weights, 0.0).to(tl.float64)
    return tl.sum(tl.reshape(mass, (CHUNK * 64,)), axis=0)


@triton.jit
def narrow(
    start,
    candidates,
    num,
    low,
    wanted,
    by_count,
    peak,
    inverse,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The bits of the largest weight w for which the candidates of at least w reach `wanted`, in number
    if `by_count`, else in mass; `low` if none above it does."""
    high = tl.full((), 0x3F800001, tl.int64)  # one bit above 1.0
    steps = tl.arange(0, 8).to(tl.int64) + 1
    while high - low > 1:
        step = (high - low + 7) // 8
        pivots = low + steps * step
        least = as_weight(tl.minimum(pivots, 0x3F800001))
        mass = tl.zeros((CHUNK * 64, 8), dtype=tl.float64)
        for first in range(0, num, CHUNK):
            weights, _, _ = load_weights(start, candidates, num, first, peak, inverse, VOCAB, CHUNK)
            flat = tl.reshape(weights, (CHUNK * 64,))
            each = tl.where(by_count, 1.0, flat)
            mass += tl.where(flat[:, None] >= least[None, :], each[:, None], 0.0).to(tl.float64)
        reached = tl.sum(mass, axis=0) >= wanted
        good = tl.sum((reached & (pivots < high)).to(tl.int64), axis=0)
        high = tl.minimum(high, low + step * (good + 1))
        low = low + step * good
    return low


@triton.jit
def floor_of(peaks, wanted, by_count):
    """Below, by less than an eighth, the largest weight w for which those of the blocks' largest weights
    that are at least w reach `wanted`, in number if `by_count`, else in sum; as bits, 0 if none does."""
    low = tl.full((), 0, tl.int64)
    high = tl.full((), 0x3F800001, tl.int64)
    each = tl.where(by_count, 1.0, peaks).to(tl.float64)
    while high - low > (1 << 20):
        middle = (low + high) // 2
        is_met = tl.sum(tl.where(peaks >= as_weight(middle), each, 0.0), axis=0) >= wanted
        low = tl.where(is_met, middle, low)
        high = tl.where(is_met, high, middle)
    return low


@triton.jit
def draw_kept(
    start,
    block_peaks,
    candidates,
    peak,
    mass,
    key,
    top_k,
    top_p,
    min_p,
    inverse,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The block that wins the race among the tokens that the rules keep, the least weight kept, and the
    least logit kept. `candidates` [NUM_BLOCKS] int32 is scratch."""
    CHUNK: tl.constexpr = 16
    places = tl.arange(0, BLOCKS)
    held = places < NUM_BLOCKS
    values = tl.load(block_peaks + places, mask=held, other=float("-inf"))
    peaks = weights_of(values, peak, inverse)
    has_top_k = top_k > 0
    has_top_p = top_p < 1.0
    lightest = min_p.to(tl.float32)
    wanted = top_p * mass
    lowest = tl.full((), 0, tl.int64)
    if has_top_k | has_top_p:
        enough = tl.where(has_top_k, top_k.to(tl.float64), wanted * (1.0 + 1e-9))
        lowest = floor_of(peaks, enough, has_top_k)
    floor = as_weight(lowest)
    if has_top_k == 0:
        rest = tl.where(has_top_p, (1.0 - top_p) * mass / VOCAB * (1.0 - 1e-4), 0.0)
        floor = tl.maximum(floor, rest.to(tl.float32))
    if (has_top_k & has_top_p) == 0:  # what top_p shares out may reach below min_p
        floor = tl.maximum(floor, lightest)
    low = floor.to(tl.int32, bitcast=True).to(tl.int64)
    is_candidate = held & (peaks >= floor) & (peaks > 0.0)
    rank = tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
    num = tl.sum(is_candidate.to(tl.int32), axis=0)
    tl.store(candidates + rank, places, mask=is_candidate)
    tl.debug_barrier()

    least = lightest
    if has_top_k:
        low = narrow(
            start, candidates, num, low, top_k.to(tl.float64), True, peak, inverse, VOCAB, CHUNK
        )
        least = tl.maximum(least, as_weight(low))
        if has_top_p:
            wanted = top_p * mass_above(
                start, candidates, num, as_weight(low), peak, inverse, VOCAB, CHUNK
            )
    if has_top_p:
        low = narrow(start, candidates, num, low, wanted, False, peak, inverse, VOCAB, CHUNK)
        least = tl.maximum(least, as_weight(low))

    best = tl.full((CHUNK,), -1.0, tl.float64)
    winners = tl.zeros((CHUNK,), dtype=tl.int32)
    lowest_logits = tl.full((CHUNK,), float("inf"), tl.float32)
    for first in range(0, num, CHUNK):
        weights, logits, blocks = load_weights(
            start, candidates, num, first, peak, inverse, VOCAB, CHUNK
        )
        is_kept = (weights >= least) & (weights > 0.0)
        masses = tl.sum(tl.where(is_kept, weights, 0.0), axis=1).to(tl.float64)
        scores = masses / exponential(key, blocks.to(tl.int64) + (1 << 40))
        is_better = scores > best
        winners = tl.where(is_better, blocks, winners)
        best = tl.where(is_better, scores, best)
        lows = tl.min(tl.where(is_kept, logits, float("inf")), axis=1)
        lowest_logits = tl.minimum(lowest_logits, lows)
    most = tl.max(best, axis=0)
    block = tl.min(tl.where(best == most, winners, 1 << 30), axis=0)
    return block, least, tl.min(lowest_logits, axis=0)
