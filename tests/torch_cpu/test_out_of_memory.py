"""A full GPU at start is one readable paragraph."""

from __future__ import annotations

import pytest
import torch

from srt.config.args import ServerArgs
from srt.config.context import RuntimeContext
from srt.config.dummy import dummy_facts
from srt.errors import ConfigError
from srt.runner.out_of_memory import describe, naming_memory

TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
    "1.20 GiB is free."
)


def published() -> RuntimeContext:
    context = RuntimeContext()
    context.publish(ServerArgs(kv_memory_gb=1.5), dummy_facts(), role="test", entropy=1)
    return context


def test_torchs_error_becomes_ours() -> None:
    with (
        pytest.raises(
            ConfigError, match="ran out while recording graphs: Tried to allocate 2.00 GiB"
        ),
        naming_memory(published(), "recording graphs"),
    ):
        raise torch.OutOfMemoryError(TORCH)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="^no$"), naming_memory(published(), "loading"):
        raise RuntimeError("no")


def test_it_names_have_need_and_what_would_fit() -> None:
    text = describe(published(), "loading", TORCH, free=1_200_000_000, total=150_000_000_000)
    for words in (
        "1.20 of 150.00 GB free",
        "KV cache has 1.50 GB",
        "--gpu-memory-fraction",
        "steps of 320",
    ):
        assert words in text
