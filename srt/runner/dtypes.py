"""Type names, as configuration spells them, and torch's own."""

from __future__ import annotations

import torch

from srt.errors import ConfigError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,  # of a KV cache only
}


def torch_dtype(name: str, field: str) -> torch.dtype:
    """Raises ConfigError naming the field."""
    if name not in DTYPES:
        raise ConfigError(f"{field} {name!r} is not known; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]
