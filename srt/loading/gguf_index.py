"""Where the tensors of a GGUF file lie: name, shape, type and byte range. Metadata values are skipped.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. After the pairs come, per tensor, its
name, number of dimensions (u32), dimensions (u64 each, fastest first), type (u32) and offset (u64) into
the data, which begins at the next multiple of `general.alignment`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from srt.errors import ConfigError

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_ALIGNMENT_KEY = b"general.alignment"


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """`shape` is in torch's order, rows first. `offset` and `num_bytes` are within the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """A mapped file; tensors read from it are views that keep the mapping alive."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if it is not a GGUF file this engine can read to its end."""
        self.path = path
        try:
            with path.open("rb") as file:  # copy-on-write: torch wants writable memory
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self.tensors = _read_index(self.data)
        except (OSError, ValueError, struct.error, UnicodeDecodeError, KeyError) as error:
            raise ConfigError(f"{path}: not a readable GGUF file: {error}") from error


def _read_index(data: mmap.mmap) -> list[GGUFTensor]:
    magic, version, num_tensors, num_pairs = struct.unpack_from("<4sIQQ", data, 0)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"magic {magic!r}, version {version}; known: b'GGUF', 2 and 3")
    at, alignment = 24, 32
    for _ in range(num_pairs):
        key, at = _string(data, at)
        (kind,) = _U32.unpack_from(data, at)
        if key == _ALIGNMENT_KEY and kind == _UINT32:
            (alignment,) = _U32.unpack_from(data, at + 4)
        at = _skip(data, at + 4, kind)
    entries = []
    for _ in range(num_tensors):
        name, at = _string(data, at)
        (num_dims,) = _U32.unpack_from(data, at)
        *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", data, at + 4)
        at += 4 + 8 * num_dims + 12
        entries.append((name.decode(), tuple(reversed(dims)), kind, offset))
    base = -(-at // alignment) * alignment
    return [_locate(data, base, *entry) for entry in entries]


def _locate(
    data: mmap.mmap, base: int, name: str, shape: tuple[int, ...], number: int, offset: int
) -> GGUFTensor:
    kind = GGMLQuantizationType(number)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count = 1
    for size in shape:
        count *= size
    num_bytes = count // block * block_bytes
    if count % block or base + offset + num_bytes > len(data):
        raise ValueError(f"tensor {name} of shape {list(shape)} does not fit into the file")
    return GGUFTensor(name=name, shape=shape, kind=kind, offset=base + offset, num_bytes=num_bytes)


def _string(data: mmap.mmap, at: int) -> tuple[bytes, int]:
    start = at + 8
    end = start + _U64.unpack_from(data, at)[0]
    return data[start:end], end


def _skip(data: mmap.mmap, at: int, kind: int) -> int:
    """The position after a value of type `kind` that begins at `at`."""
    if kind == _STRING:
        return at + 8 + int(_U64.unpack_from(data, at)[0])
    if kind != _ARRAY:
        return at + _SIZES[kind]
    (item,) = _U32.unpack_from(data, at)
    (count,) = _U64.unpack_from(data, at + 4)
    at += 12
    if item == _STRING:
        read = _U64.unpack_from
        for _ in range(count):
            at += 8 + read(data, at)[0]
        return at
    if item == _ARRAY:
        for _ in range(count):
            at = _skip(data, at, item)
        return at
    return at + int(count) * _SIZES[item]
