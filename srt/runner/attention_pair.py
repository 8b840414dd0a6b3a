"""Which attention a runner uses, read off the runner and from nowhere else: two runners of one process
may differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from srt.config.runner_spec import RunnerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackendStrs:
    """Names. `is_draft_override`: a draft's own backend took both halves."""

    prefill: str
    decode: str
    is_draft_override: bool = False


class HasAttention(Protocol):
    """What of a runner decides its attention."""

    @property
    def spec(self) -> RunnerSpec: ...

    @property
    def draft_attention_backend(self) -> str | None: ...


def resolve_draft_attention_backend(spec: RunnerSpec, passed: str | None) -> str | None:
    """None for a target, whatever was passed. For a draft what its algorithm passed, else what
    --speculative-draft-attention-backend asks for, else None."""
    if spec.role == "target":
        return None
    return passed if passed is not None else spec.draft_attention_backend


def resolve_attention_backend_strs(runner: HasAttention) -> AttentionBackendStrs:
    """A draft with a backend of its own has it for both halves; otherwise its spec's pair, which for a
    draft is the target's."""
    own = runner.draft_attention_backend
    if own is not None:
        return AttentionBackendStrs(prefill=own, decode=own, is_draft_override=True)
    spec = runner.spec
    return AttentionBackendStrs(
        prefill=spec.prefill_attention_backend, decode=spec.decode_attention_backend
    )
