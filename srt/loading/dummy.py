"""Reproducible noise in place of weights, for tests and timing without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import torch

from srt.layers.parameters import Parameter

SPREAD = 0.02  # standard deviation, what fresh models of this kind start from


def dummy_tensors(
    parameters: list[Parameter], seed: int, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Float32 noise for every source, keyed by (seed, name): neither order nor sharding matters. Norms
    scatter around one, indices are zero. It is drawn where it is wanted, so that a large model takes no
    longer than its memory does; each type of device has its own generator, and so its own values."""
    seen: set[str] = set()
    for parameter in parameters:
        for part in (*parameter.parts, *parameter.biases):
            if part.source in seen:
                continue
            seen.add(part.source)
            if parameter.kind == "index":
                yield part.source, torch.zeros(part.shape, dtype=torch.int64, device=device)
                continue
            key = crc32(f"{seed} {part.source}".encode())  # the generator reads 32 bits of a seed
            generator = torch.Generator(device).manual_seed(key)
            values = torch.empty(part.shape, device=device)
            values.normal_(0.0, SPREAD, generator=generator)
            yield part.source, values.add_(1.0) if parameter.kind == "norm" else values
