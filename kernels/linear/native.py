"""Packs a weight for linear.c and calls it. bfloat16 in; bfloat16 or float32 out.

Layout of the packed weight: [N / 32, K / g, 32, g] with g = 2 (bfloat16) or 4 (int8), N and K padded
with zeros: 32 output channels a panel, and inside it the g values along K that one dot instruction
multiplies lie together. The bytes come from the library's arena (huge pages where there are any).
"""

from __future__ import annotations

import torch

from kernels.linear.reference import quantize_rows
from kernels.native_build import INT, POINTER, Library

PANEL = 32


def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: str | None,
    out_dtype: torch.dtype | None,
    library: Library,
) -> NativeLinear | NativeInt8Linear:
    if out_dtype not in (None, torch.bfloat16, torch.float32):
        raise ValueError(
            f"out_dtype is {out_dtype}; implementation 'native' writes bfloat16 or float32"
        )
    wide = out_dtype == torch.float32
    if quantization == "int8":
        return NativeInt8Linear(weight, bias, wide, library)
    return NativeLinear(weight, bias, wide, library)


class NativeLinear:
    """Owns the packed weight; the tensor passed in may be freed."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool, library: Library
    ) -> None:
        self._channels, self._size = weight.shape
        self._weight = pack_panels(weight, 2, library)
        self._steps = self._weight.shape[1]
        self._bias = pad_channels(bias, torch.float32)
        self._out_dtype = torch.float32 if wide else torch.bfloat16
        self._wide = int(wide)
        self._weight_pointer = self._weight.data_ptr()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._run = library.function(
            "linear_bf16", *[POINTER] * 3, *[INT] * 2, POINTER, INT, POINTER, INT
        )
        self._pool = library.pool
        self.bytes = self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        if self._size % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        y = torch.empty((tokens, self._channels), dtype=self._out_dtype)
        self._run(
            self._pool.pointer,
            self._weight_pointer,
            self._bias_pointer,
            self._channels,
            self._steps,
            x.data_ptr(),
            tokens,
            y.data_ptr(),
            self._wide,
        )
        return y


class NativeInt8Linear:
    """Owns the int8 weight, a scale and a shift per channel; the tensor passed in may be freed."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, wide: bool, library: Library
    ) -> None:
        self._channels, self._size = weight.shape
        values, scales = quantize_rows(weight)
        self._weight = pack_panels(values, 4, library)
        self._steps = self._weight.shape[1]
        self._bias = pad_channels(bias, torch.float32)
        self._scales = pad_channels(scales, torch.float32)
        # x is stored 128 too high (the instruction wants it unsigned); this takes the excess away.
        self._shift = pad_channels(values.sum(dim=1, dtype=torch.int32) * -128, torch.int32)
        assert self._scales is not None and self._shift is not None
        self._out_dtype = torch.float32 if wide else torch.bfloat16
        self._wide = int(wide)
        self._pointers = (
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self._scales.data_ptr(),
            self._shift.data_ptr(),
        )
        self._run = library.function(
            "linear_int8",
            *[POINTER] * 5,
            *[INT] * 2,
            POINTER,
            *[INT] * 2,
            *[POINTER] * 2,
            INT,
        )
        self._pool = library.pool
        self.bytes = sum(
            tensor.nbytes
            for tensor in (self._weight, self._scales, self._shift, self._bias)
            if tensor is not None
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        y = torch.empty((tokens, self._channels), dtype=self._out_dtype)
        scratch = torch.empty(tokens * 4 * (self._steps + 1), dtype=torch.uint8)
        self._run(
            self._pool.pointer,
            *self._pointers,
            self._channels,
            self._steps,
            x.data_ptr(),
            self._size,
            tokens,
            scratch.data_ptr(),
            y.data_ptr(),
            self._wide,
        )
        return y


def pack_panels(weight: torch.Tensor, group: int, library: Library) -> torch.Tensor:
    """weight: [N, K]. Returns [ceil(N / 32), ceil(K / group), 32, group], in the library's arena."""
    channels, size = weight.shape
    panels, steps = -(-channels // PANEL), -(-size // group)
    nbytes = panels * steps * PANEL * group * weight.element_size()
    packed = library.arena.allocate(nbytes).view(weight.dtype).view(panels, steps, PANEL, group)
    if channels % PANEL or size % group:
        padding = (0, steps * group - size, 0, panels * PANEL - channels)
        weight = torch.nn.functional.pad(weight, padding)
    packed.copy_(weight.view(panels, PANEL, steps, group).transpose(1, 2))
    return packed


def pad_channels(values: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if values is None:
        return None
    return torch.nn.functional.pad(values.to(dtype), (0, -len(values) % PANEL)).contiguous()
