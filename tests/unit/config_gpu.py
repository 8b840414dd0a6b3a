"""Facts of machines with GPUs that do not exist, for the tests of configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

from srt.config.dummy import dummy_facts
from srt.config.facts import Facts, GpuFacts

VERSIONS = {"torch": "2.11.0+cu130", "triton": "3.6.0", "flashinfer-python": "0.6.12"}
LLAMA = {
    "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
    "vocab_size": 128_256, "num_parameters": 8_030_000_000, "context_length": 131_072,
    "config": {"architectures": ["LlamaForCausalLM"], "intermediate_size": 14_336},
}  # fmt: skip


def gpu(**changes: Any) -> GpuFacts:
    """An H200 that nobody else uses."""
    fields: dict[str, Any] = {
        "index": 0,
        "name": "NVIDIA H200",
        "capability": 90,
        "memory_total": 150_000_000_000,
        "memory_free": 149_500_000_000,
        "driver": "580.65.06",
    }
    return GpuFacts(**fields | changes)


def gpu_facts(
    card: dict[str, Any] | None = None,
    machine: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
) -> Facts:
    """A Llama of 8 billion parameters beside one GPU. `without`: packages that are not installed."""
    facts = dummy_facts()
    versions = {name: version for name, version in VERSIONS.items() if name not in without}
    fields: dict[str, Any] = {
        "gpus": [gpu(**card or {})],
        "has_cuda": True,
        "torch_cuda": "13.0",
        "versions": versions,
        "memory_available": 400_000_000_000,
    }
    return Facts(
        machine=dataclasses.replace(facts.machine, **fields | (machine or {})),
        model=dataclasses.replace(facts.model, **LLAMA | (model or {})),
    )
