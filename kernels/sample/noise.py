"""Randomness without state: a number for every (seed, position, counter), the same on every machine.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014) with the finalizer that Stafford calls mix 13. In 64-bit arithmetic that wraps around:

    mix(x):   x ^= x >>> 30;  x *= 0xBF58476D1CE4E5B9
              x ^= x >>> 27;  x *= 0x94D049BB133111EB
              x ^= x >>> 31
    key(seed, position)  = mix(mix(seed) + (position + 1) * 0x9E3779B97F4A7C15)
    bits(key, counter)   = mix(key + (counter + 1) * 0x9E3779B97F4A7C15)
    uniform              = ((bits >>> 12) + 0.5) / 2^52         never 0, never 1
    exponential          = -log(uniform)

A row's noise depends on nothing else: not on the batch, the row, or what was drawn before.
"""

from __future__ import annotations

import torch


def _signed(value: int) -> int:
    """The int64 with the same low 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)


def shift_right(x: torch.Tensor, num: int) -> torch.Tensor:
    """Logical shift; torch shifts int64 arithmetically."""
    return (x >> num) & ((1 << (64 - num)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ shift_right(x, 30)) * FIRST
    x = (x ^ shift_right(x, 27)) * SECOND
    return x ^ shift_right(x, 31)


def seed_key(seed: int) -> int:
    """`mix` of one number. Only the low 64 bits of a seed count."""
    mask = (1 << 64) - 1
    x = seed & mask
    x = ((x ^ (x >> 30)) * FIRST) & mask
    x = ((x ^ (x >> 27)) * SECOND) & mask
    return _signed(x ^ (x >> 31))


def seed_keys(seeds: list[int], device: torch.device) -> torch.Tensor:
    """[R] int64."""
    return torch.tensor([seed_key(seed) for seed in seeds], dtype=torch.int64, device=device)


def position_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`seeds` from `seed_keys`, `positions` the number of tokens generated before; both [R] int64."""
    return mix(seeds + (positions + 1) * GOLDEN)


def exponential(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Standard exponential noise, [R, N] float64, for keys [R] and counters [R or 1, N] int64."""
    bits = mix(keys[:, None] + (counters + 1) * GOLDEN)
    uniform = (shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_()
