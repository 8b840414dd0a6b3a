"""What may differ between the target and a draft: resolved once, stamped on the runner before its
backends are built, and never in a bag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RunnerRole = Literal["target", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSpec:
    """One runner's values, all decided. Types are names, e.g. "bfloat16": this module knows no torch."""

    role: RunnerRole
    model_path: str
    load_format: str  # safetensors, gguf, sharded, dummy, script
    dtype: str
    quantization: str | None  # None or int8
    context_length: int  # tokens, prompt and output together
    kv_cache_dtype: str
    prefill_attention_backend: str
    decode_attention_backend: str
    graph_sizes: tuple[int, ...]  # batch sizes with a captured graph; () runs eagerly
    prefill_graph_sizes: tuple[int, ...] = ()  # numbers of tokens of steps with prompts, likewise
    draft_attention_backend: str | None = None  # a draft's own, for both halves; None: as above
    step: int | None = None  # which of the draft's layers, if each has a runner; None: all of it

    @property
    def label(self) -> str:
        """What tells it from the other runners: target, draft, or draft-1 and on."""
        return self.role if self.step is None else f"{self.role}-{self.step + 1}"
