"""The header of a safetensors file: u64 length, then JSON of name to {dtype, shape, data_offsets}.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path

from srt.errors import ConfigError

_MOST_BYTES = 100_000_000  # the format's own limit of a header
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_WIDE = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}


def count_parameters(path: Path) -> Counter[str]:
    """Numbers of the file per type, e.g. {"BF16": 134515008}. Raises ConfigError if it is no whole
    header."""
    counts: Counter[str] = Counter()
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MOST_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                counts[tensor["dtype"]] += math.prod(tensor["shape"])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error!r}") from None
    return counts


def stored_bytes(counts: Counter[str]) -> int:
    """Bytes of all these numbers; types that are not known to be wider have one byte."""
    return sum(count * _WIDE.get(code, 1) for code, count in counts.items())


def code_of(dtype: str) -> str:
    """The format's name of a float type."""
    return next(code for code, name in _DTYPES.items() if name == dtype)


def main_dtype(counts: Counter[str]) -> str | None:
    """The float type that most numbers have; None if there are no floats."""
    for code, _ in counts.most_common():
        if code in _DTYPES:
            return _DTYPES[code]
    return None
