"""A GPU whose memory runs out while the engine starts: said in words that help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from srt.config.context import RuntimeContext
from srt.errors import ConfigError


@contextmanager
def naming_memory(context: RuntimeContext, what: str) -> Iterator[None]:
    """While `what` goes on ("loading the weights"), torch's error of a full GPU becomes a ConfigError
    with need, have and what would make it fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        raise ConfigError(describe(context, what, str(error), free=free, total=total)) from None


def describe(context: RuntimeContext, what: str, error: str, *, free: int, total: int) -> str:
    """`error` is torch's own sentence, which names what it tried to allocate."""
    state = context.state
    fraction = state.memory.gpu_memory_fraction
    asked = error.split(". ")[1] if ". " in error else error
    lower = max(0.05, round(fraction - 0.1, 2))
    return (
        f"the GPU's memory ran out while {what}: {asked.rstrip('.')}, with {free / 1e9:.2f} of "
        f"{total / 1e9:.2f} GB free; the KV cache has {state.memory.kv_memory_gb:.2f} GB and steps of "
        f"{state.schedule.max_step_tokens} tokens the rest of --gpu-memory-fraction {fraction:g}; "
        f"allowed: --gpu-memory-fraction {lower:g}, a smaller --max-step-tokens or --kv-memory-gb, or "
        "ending what else runs on this GPU"
    )
