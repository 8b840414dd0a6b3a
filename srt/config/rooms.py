"""What memory there is for the KV cache, on a CPU and on a GPU. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from srt.config.facts import Facts, GpuFacts
from srt.config.footprint import CONTEXT_BYTES, WORKSPACE_BYTES, Reserve
from srt.config.rules_model import ModelPlan

CPU_KV_BYTES = 256_000_000
AVAILABLE_SHARE = 0.25  # of the free memory, for KV, by default
ROOM_SHARE = 0.75  # of what the weights leave free: the most that one context may make KV take
MOST_TOKENS = 1 << 20  # by default: a tiny model's cheap tokens would make millions of pages
GPU_FRACTION = 0.9  # of the GPU's memory: fragments and other libraries need some too
CONTEXT_SHARE = 0.95  # of a GPU's estimate: what is measured may be a little less


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes. `most`: what a named budget may have. `for_context`: what a model's context length may ask
    for before it is cut. `name`, `beside`, `taken`, `remedy`: words for messages. `most_tokens`: of a
    default; None: as many as fit."""

    available: int
    most: int
    for_context: int
    most_tokens: int | None
    name: str
    beside: str
    taken: str
    remedy: str
    share: str = ""  # on a GPU, how the budget came about
    is_gpu: bool = False

    def usual(self, one_context: int) -> tuple[int, str]:
        """The budget nobody named, and why; `one_context` bytes must fit in."""
        if self.is_gpu:
            return self.most, self.share
        share = int(self.available * AVAILABLE_SHARE)
        if one_context > min(share, CPU_KV_BYTES):
            return one_context, "room for one whole context"
        if share < CPU_KV_BYTES:
            return share, f"a quarter of the free memory ({megabytes(self.available)})"
        return CPU_KV_BYTES, "enough to keep a CPU busy"


def cpu_room(facts: Facts, plan: ModelPlan, ranks: int) -> Room:
    """`ranks` processes share the host's memory, `plan` is of one."""
    available = facts.machine.memory_available // ranks
    left = max(0, available - plan.weight_bytes)
    return Room(
        available=available,
        most=left,
        for_context=int(left * ROOM_SHARE),
        most_tokens=MOST_TOKENS,
        name="free memory",
        beside=f"beside {megabytes(plan.weight_bytes)} of weights",
        taken=f"{megabytes(available)} are available and the weights take "
        f"{megabytes(plan.weight_bytes)} of them",
        remedy="free memory or take a smaller model",
    )


def gpu_room(gpu: GpuFacts, fraction: float, plan: ModelPlan, reserve: Reserve) -> Room:
    """fraction * total - others' use - weights - activations - graphs - what CUDA itself takes."""
    others = gpu.memory_total - gpu.memory_free
    rest = CONTEXT_BYTES + WORKSPACE_BYTES
    left = (
        int(fraction * gpu.memory_total)
        - others
        - plan.weight_bytes
        - reserve.total
        - CONTEXT_BYTES
    )
    left = max(0, left)
    parts = (
        f"{gigabytes(others)} used by others, {gigabytes(plan.weight_bytes)} weights, "
        f"{gigabytes(reserve.activations)} activations, {gigabytes(reserve.graphs)} graphs, "
        f"{gigabytes(rest)} CUDA"
    )
    whole = f"{fraction:g} of {gigabytes(gpu.memory_total)}"
    return Room(
        available=gpu.memory_free,
        most=left,
        for_context=int(left * CONTEXT_SHARE),
        most_tokens=None,
        name="the GPU",
        beside=f"of {whole} beside {parts}",
        taken=f"{whole} leaves {gigabytes(left)} beside {parts}",
        remedy="raise --gpu-memory-fraction, lower --max-step-tokens, or take a smaller model or a "
        "larger GPU",
        share=f"estimated before loading: {whole} less {parts}",
        is_gpu=True,
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
