"""GGUF's block formats to plain numbers. The common ones in torch, straight into the target type; the
rest through the gguf package, which is right for all of them but slower.

A block is 32 values of a row (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h):
Q8_0  fp16 d, 32 int8 q            value = d * q
Q4_0  fp16 d, 16 bytes of nibbles  value = d * (q - 8)
Q4_1  fp16 d, fp16 m, 16 bytes     value = d * q + m
The low nibbles are the first 16 values, the high ones the last 16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGMLQuantizationType as Kind
from gguf import dequantize

BLOCKS_AT_ONCE = 16384  # half a million values: stays in the cache, and memory stays flat

_PLAIN = {
    Kind.F32: torch.float32,
    Kind.F16: torch.float16,
    Kind.BF16: torch.bfloat16,
}


def decode(
    raw: torch.Tensor, kind: Kind, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """raw: [bytes] uint8. Computes in float32, rounds once to `dtype`; returns `shape`."""
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind]).to(dtype).view(shape)
    if kind in _BLOCKS:
        block_bytes, decode_blocks = _BLOCKS[kind]
        blocks = raw.view(-1, block_bytes)
        values = torch.empty((len(blocks), 32), dtype=dtype)
        for first in range(0, len(blocks), BLOCKS_AT_ONCE):
            last = first + BLOCKS_AT_ONCE
            values[first:last] = decode_blocks(blocks[first:last])
        return values.view(shape)
    packed = raw.numpy().reshape(*shape[:-1], -1)
    return torch.from_numpy(dequantize(packed, kind)).to(dtype).view(shape)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = blocks[:, :2].view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8) * scale


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = blocks[:, :2].view(torch.float16).float()
    return (_nibbles(blocks[:, 2:]).to(torch.int8) - 8) * scale


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scale_and_least = blocks[:, :4].view(torch.float16).float()
    return (_nibbles(blocks[:, 4:]) * scale_and_least[:, :1]).add_(scale_and_least[:, 1:])


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=1)


_BLOCKS: dict[Kind, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    Kind.Q8_0: (34, _q8_0),
    Kind.Q4_0: (18, _q4_0),
    Kind.Q4_1: (20, _q4_1),
}
