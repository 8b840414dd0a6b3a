"""Weights in fewer bits, as they are stored and what they mean.

fp8: for each channel n a scale s(n) = max|W[n]| / 448 and values q in float8_e4m3fn,
W[n, k] = q[n, k] s(n).
int4: for each channel and each group of `group` columns a scale and a zero point, values q of 0..15,
W[n, k] = (q[n, k] - z[n, k // group]) s[n, k // group].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """values: [N, K] float8_e4m3fn; scales: [N] float32. `dtype`: of the activations."""

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def select_rows(self, rows: torch.Tensor) -> Fp8Weight:
        values = self.values.view(torch.uint8)[rows].view(FP8)
        return replace(self, values=values, scales=self.scales[rows])

    def narrow(self, dim: int, first: int, size: int) -> Fp8Weight:
        """As of a tensor [N, K]."""
        scales = self.scales.narrow(0, first, size) if dim == 0 else self.scales
        return replace(self, values=self.values.narrow(dim, first, size), scales=scales)

    def to(self, *, device: torch.device, dtype: torch.dtype | None) -> Fp8Weight:
        """`dtype`: what its activations have."""
        return Fp8Weight(
            values=self.values.to(device), scales=self.scales.to(device), dtype=dtype or self.dtype
        )

    def contiguous(self) -> Fp8Weight:
        return replace(self, values=self.values.contiguous(), scales=self.scales.contiguous())

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.values.float() * self.scales[:, None]).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight:
    """values: [N, K / 2] uint8, two of a row in each byte, see `pack_nibbles`; scales: [N, K / group],
    any float; zeros: [N, K / group] uint8. `dtype`: of the activations."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], 2 * self.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes

    def select_rows(self, rows: torch.Tensor) -> Int4Weight:
        return replace(
            self, values=self.values[rows], scales=self.scales[rows], zeros=self.zeros[rows]
        )

    def narrow(self, dim: int, first: int, size: int) -> Int4Weight:
        """As of a tensor [N, K]; columns by whole units and groups."""
        if dim == 0:
            return self.select_rows(torch.arange(first, first + size, device=self.device))
        check_group(first, self.group)
        check_group(size, self.group)
        groups = (1, first // self.group, size // self.group)
        return replace(
            self,
            values=self.values.narrow(1, first // 2, size // 2),
            scales=self.scales.narrow(*groups),
            zeros=self.zeros.narrow(*groups),
        )

    def to(self, *, device: torch.device, dtype: torch.dtype | None) -> Int4Weight:
        """`dtype`: what its activations have; the scales keep theirs."""
        return replace(
            self,
            values=self.values.to(device),
            scales=self.scales.to(device),
            zeros=self.zeros.to(device),
            dtype=dtype or self.dtype,
        )

    def contiguous(self) -> Int4Weight:
        return replace(
            self,
            values=self.values.contiguous(),
            scales=self.scales.contiguous(),
            zeros=self.zeros.contiguous(),
        )

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        steps = unpack_nibbles(self.values, self.group)
        wide = steps.view(len(steps), -1, self.group).float() - self.zeros[:, :, None]
        wide *= self.scales.float()[:, :, None]
        return wide.view(self.shape).to(dtype)


QuantizedWeight = Fp8Weight | Int4Weight


def stack_rows(parts: Sequence[torch.Tensor | QuantizedWeight]) -> torch.Tensor | QuantizedWeight:
    """One weight of several with as many columns. Raises ValueError if they are not stored alike."""
    if len(parts) == 1:
        return parts[0]
    plain = [part for part in parts if isinstance(part, torch.Tensor)]
    fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
    int4 = [part for part in parts if isinstance(part, Int4Weight)]
    if len(plain) == len(parts):
        return torch.cat(plain)
    if len(fp8) == len(parts):
        values = torch.cat([part.values.view(torch.uint8) for part in fp8]).view(FP8)
        return replace(fp8[0], values=values, scales=torch.cat([part.scales for part in fp8]))
    if len(int4) == len(parts) and len({part.group for part in int4}) == 1:
        return replace(
            int4[0],
            values=torch.cat([part.values for part in int4]),
            scales=torch.cat([part.scales for part in int4]),
            zeros=torch.cat([part.zeros for part in int4]),
        )
    raise ValueError("parts of one linear are not stored alike")


def quantize_fp8(weight: torch.Tensor) -> Fp8Weight:
    values, scales = quantize_tokens(weight)
    return Fp8Weight(values=values, scales=scales, dtype=weight.dtype)


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [T, K]. Returns (float8_e4m3fn [T, K], float32 scales [T]); a row of zeros has scale 0."""
    wide = x.float()
    scales = wide.abs().amax(dim=1) / FP8_MOST
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    return (wide * inverse[:, None]).clamp_(-FP8_MOST, FP8_MOST).to(FP8), scales


def quantize_int4(weight: torch.Tensor, group: int = 128) -> Int4Weight:
    """To nearest, between each group's least and greatest value (zero included)."""
    check_group(weight.shape[1], group)
    wide = weight.float().view(len(weight), -1, group)
    least, most = wide.amin(2).clamp_max(0.0), wide.amax(2).clamp_min(0.0)
    scales = ((most - least) / 15).clamp_min(1e-8).to(weight.dtype)
    zeros = (-least / scales.float()).round().clamp_(0, 15)
    steps = (wide / scales.float()[:, :, None] + zeros[:, :, None]).round_().clamp_(0, 15)
    return Int4Weight(
        values=pack_nibbles(steps.flatten(1).to(torch.uint8), group),
        scales=scales,
        zeros=zeros.to(torch.uint8),
        group=group,
        dtype=weight.dtype,
    )


def half_unit(group: int) -> int:
    """How many columns one after the other lie in the low halves of as many bytes."""
    return min(64, group)


def check_group(size: int, group: int) -> None:
    if group not in GROUPS:
        raise ValueError(f"int4 groups of {group} columns are not implemented; known: {GROUPS}")
    if size % group or size % (2 * half_unit(group)):
        raise ValueError(
            f"int4 in groups of {group} needs a multiple of {max(group, 2 * half_unit(group))} "
            f"columns, not {size}"
        )


def pack_nibbles(steps: torch.Tensor, group: int) -> torch.Tensor:
    """steps: [N, K] uint8 of 0..15 -> [N, K / 2]. Columns in units of twice `half_unit`: byte i of a
    unit has the unit's column i in its low half and column i + half_unit in its high half."""
    units = steps.view(len(steps), -1, 2, half_unit(group))
    low, high = units.unbind(2)
    return (low | (high << 4)).view(len(steps), -1)


def unpack_nibbles(values: torch.Tensor, group: int) -> torch.Tensor:
    units = values.view(len(values), -1, half_unit(group))
    return torch.stack((units & 15, units >> 4), dim=2).view(len(values), -1)
