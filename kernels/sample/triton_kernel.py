"""Inside the kernels: noise, weights, and the least weight that top_k, top_p and min_p keep.

A weight is a float32 in [0, 1], so its bits, read as an int, are in the same order as it. The least
weight kept lies in an interval of such ints: that a rule is met by "all tokens of at least this weight"
(they are k, or their mass is p) is true up to the weight sought and false above it.

1. Only tokens in candidate blocks are looked at: blocks of 64 ids whose largest weight is not below a
   floor under the weight sought. For k tokens the k-th largest of the blocks' largest weights is such a
   floor. For the mass p there are two: the weight down to which the blocks' largest alone reach p, and
   (1 - p) * mass / V, as all lighter tokens together weigh less than what p leaves out.
2. `narrow`: a pass tries four pivots; over the candidates while too many tokens lie in the interval,
   then over a list of these.
3. `gather` makes that list, and a shorter one; `settle` tries the weight of each token in it at once.

Logits of a model are peaked, and few tokens are above the floor: then there is nothing to narrow.
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
def as_bits(weight):
    return weight.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def load_weights(
    start, candidates, num, first, peak, inverse, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """Weights and logits [CHUNK, 64] of the candidate blocks first .. first + CHUNK - 1, and their ids;
    zero and minus infinity where there is none."""
    places = first + tl.arange(0, CHUNK)
    blocks = tl.load(candidates + places, mask=places < num, other=0)
    ids = blocks[:, None] * 64 + tl.arange(0, 64)[None, :]
    held = (ids < VOCAB) & (places < num)[:, None]
    values = tl.load(start + ids, mask=held, other=float("-inf")).to(tl.float32)
    return weights_of(values, peak, inverse), values, blocks


@triton.jit
def load_some(
    start,
    candidates,
    num,
    first,
    peak,
    inverse,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_LIST: tl.constexpr,
):
    """Weights [CHUNK, 64] of the candidates, or IS_LIST: of the `num` that are listed at `start`."""
    if IS_LIST:
        places = (first + tl.arange(0, CHUNK))[:, None] * 64 + tl.arange(0, 64)[None, :]
        return tl.load(start + places, mask=places < num, other=0.0)
    else:
        weights, _, _ = load_weights(start, candidates, num, first, peak, inverse, VOCAB, CHUNK)
        return weights


@triton.jit
def narrow(
    start,
    candidates,
    num,
    low,
    high,
    wanted,
    by_count,
    peak,
    inverse,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_LIST: tl.constexpr,
):
    """A fifth of the interval [low, high): reaching `wanted`, in number if `by_count`, else in mass, is
    still true at its lower end, and false at its upper one."""
    step = (high - low + 4) // 5
    first_least = as_weight(tl.minimum(low + step, high))
    second_least = as_weight(tl.minimum(low + 2 * step, high))
    third_least = as_weight(tl.minimum(low + 3 * step, high))
    fourth_least = as_weight(tl.minimum(low + 4 * step, high))
    first_mass = tl.zeros((CHUNK, 64), dtype=tl.float64)
    second_mass = tl.zeros((CHUNK, 64), dtype=tl.float64)
    third_mass = tl.zeros((CHUNK, 64), dtype=tl.float64)
    fourth_mass = tl.zeros((CHUNK, 64), dtype=tl.float64)
    end = (num + 63) // 64 if IS_LIST else num
    for first in tl.range(0, end, CHUNK, num_stages=3):
        weights = load_some(start, candidates, num, first, peak, inverse, VOCAB, CHUNK, IS_LIST)
        each = tl.where(by_count, 1.0, weights).to(tl.float64)
        first_mass += tl.where(weights >= first_least, each, 0.0)
        second_mass += tl.where(weights >= second_least, each, 0.0)
        third_mass += tl.where(weights >= third_least, each, 0.0)
        fourth_mass += tl.where(weights >= fourth_least, each, 0.0)
    good = ((tl.sum(first_mass) >= wanted) & (low + step < high)).to(tl.int64)
    good += ((tl.sum(second_mass) >= wanted) & (low + 2 * step < high)).to(tl.int64)
    good += ((tl.sum(third_mass) >= wanted) & (low + 3 * step < high)).to(tl.int64)
    good += ((tl.sum(fourth_mass) >= wanted) & (low + 4 * step < high)).to(tl.int64)
    return low + step * good, tl.minimum(high, low + step * (good + 1))


@triton.jit
def gather(
    start,
    candidates,
    listed,
    num,
    low,
    high,
    peak,
    inverse,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_LIST: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Lists the weights in [low, high), as many as fit. Returns how many there are, and of those above
    the number and the mass."""
    least, most = as_weight(low), as_weight(high)
    num_above = tl.zeros((CHUNK, 64), dtype=tl.int32)
    mass_above = tl.zeros((CHUNK, 64), dtype=tl.float64)
    num_listed = 0
    tl.debug_barrier()  # the list's last readers are done
    end = (num + 63) // 64 if IS_LIST else num
    for first in tl.range(0, end, CHUNK, num_stages=3):
        weights = load_some(start, candidates, num, first, peak, inverse, VOCAB, CHUNK, IS_LIST)
        is_above = weights >= most
        num_above += is_above.to(tl.int32)
        mass_above += tl.where(is_above, weights, 0.0).to(tl.float64)
        is_listed = ((weights >= least) & (weights < most) & (weights > 0.0)).to(tl.int32)
        in_block = tl.cumsum(is_listed, axis=1)
        of_block = tl.sum(is_listed, axis=1)
        before = num_listed + tl.cumsum(of_block, axis=0) - of_block
        ranks = before[:, None] + in_block - 1
        tl.store(listed + ranks, weights, mask=(is_listed > 0) & (ranks < CAPACITY))
        num_listed += tl.sum(of_block, axis=0)
    tl.debug_barrier()
    return num_listed, tl.sum(num_above), tl.sum(mass_above)


@triton.jit
def settle(
    listed, num_listed, low, wanted, by_count, num_above, mass_above, CAPACITY: tl.constexpr
):
    """The largest listed weight at which `wanted` is reached, or that of `low`, and the mass from there
    on. Each listed weight is compared with each."""
    STEP: tl.constexpr = 16
    places = tl.arange(0, CAPACITY)
    weights = tl.load(listed + places, mask=places < num_listed, other=-1.0)
    reached = tl.zeros((CAPACITY,), dtype=tl.float64)
    for first in range(0, num_listed, STEP):
        others_at = first + tl.arange(0, STEP)
        others = tl.load(listed + others_at, mask=others_at < num_listed, other=-2.0)
        each = tl.where(by_count, 1.0, others).to(tl.float64)
        is_above = others[None, :] >= weights[:, None]
        reached += tl.sum(tl.where(is_above, each[None, :], 0.0), axis=1)
    above = tl.where(by_count, num_above.to(tl.float64), mass_above)
    is_met = (above + reached >= wanted) & (places < num_listed)
    least = tl.maximum(as_weight(low), tl.max(tl.where(is_met, weights, 0.0), axis=0))
    kept = tl.where((weights >= least) & (places < num_listed), weights, 0.0).to(tl.float64)
    return least, mass_above + tl.sum(kept, axis=0)


@triton.jit
def least_kept(
    start,
    candidates,
    listed,
    num,
    low,
    wanted,
    by_count,
    peak,
    inverse,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The largest weight for which the candidates of at least it reach `wanted`, in number or in mass;
    that of the bits `low` if none above does. And the mass of these candidates."""
    SHORT: tl.constexpr = 512
    LONG: tl.constexpr = LISTED - SHORT
    high = tl.full((), 0x3F800001, tl.int64)  # one bit above 1.0
    is_wide = num > LONG // 64
    num_long = tl.full((), LONG + 1, tl.int32)
    num_above = tl.full((), 0, tl.int32)
    mass_above = tl.full((), 0.0, tl.float64)
    while (num_long > LONG) & (high - low > 1):
        if is_wide:
            for _ in range(2):
                low, high = narrow(
                    start, candidates, num, low, high, wanted, by_count,
                    peak, inverse, VOCAB, CHUNK, False,
                )  # fmt: skip
        num_long, num_above, mass_above = gather(
            start, candidates, listed, num, low, high, peak, inverse, VOCAB, CHUNK, False, LONG
        )
        is_wide = num > 0
    if num_long > LONG:  # so many of one weight
        least = as_weight(low)
        mass = mass_above + num_long.to(tl.float64) * least.to(tl.float64)
    else:
        num_short = num_long
        short = listed
        if num_long > SHORT:
            short = listed + LONG
            above = tl.where(by_count, num_above.to(tl.float64), mass_above)
            more_above = tl.full((), 0, tl.int32)
            more_mass = tl.full((), 0.0, tl.float64)
            while (num_short > SHORT) & (high - low > 1):
                low, high = narrow(
                    listed, candidates, num_long, low, high, wanted - above, by_count,
                    peak, inverse, VOCAB, CHUNK, True,
                )  # fmt: skip
                num_short, more_above, more_mass = gather(
                    listed, candidates, short, num_long, low, high,
                    peak, inverse, VOCAB, CHUNK, True, SHORT,
                )  # fmt: skip
            num_above += more_above
            mass_above += more_mass
        if num_short > SHORT:
            least = as_weight(low)
            mass = mass_above + num_short.to(tl.float64) * least.to(tl.float64)
        else:
            least, mass = settle(
                short, num_short, low, wanted, by_count, num_above, mass_above, SHORT
            )
    return least, mass


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
    listed,
    peak,
    mass,
    key,
    top_k,
    top_p,
    min_p,
    inverse,
    VOCAB: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS_HELD: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The block that wins the race among the tokens that the rules keep, the least weight kept, and the
    least logit kept. Scratch: `candidates` [NUM_BLOCKS] int32, `listed` [LISTED] float32."""
    CHUNK: tl.constexpr = 32
    places = tl.arange(0, BLOCKS_HELD)
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
    is_candidate = held & (peaks >= floor) & (peaks > 0.0)
    rank = tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
    num = tl.sum(is_candidate.to(tl.int32), axis=0)
    tl.store(candidates + rank, places, mask=is_candidate)
    tl.debug_barrier()

    least = floor
    for rule in range(2):
        by_count = rule == 0
        if tl.where(by_count, has_top_k, has_top_p):
            least, mass = least_kept(
                start,
                candidates,
                listed,
                num,
                as_bits(least),
                tl.where(by_count, top_k.to(tl.float64), tl.where(has_top_k, top_p * mass, wanted)),
                by_count,
                peak,
                inverse,
                VOCAB,
                CHUNK,
                LISTED,
            )
    least = tl.maximum(least, lightest)

    best = tl.full((CHUNK,), -1.0, tl.float64)
    winners = tl.zeros((CHUNK,), dtype=tl.int32)
    lowest_logits = tl.full((CHUNK,), float("inf"), tl.float32)
    for first in tl.range(0, num, CHUNK, num_stages=3):
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
