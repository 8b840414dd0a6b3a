"""The load-time gate of the chunked prefix cache.

Whether the model uses MLA is known when it is loaded, and backends from outside this project add
themselves to the list after `resolve`; so this is decided while loading, before any backend is built.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from srt.config.args import ServerArgs
from srt.config.context import get_context
from srt.config.resolve import Resolution
from srt.config.trail import TrailEntry
from srt.errors import ConfigError

logger = logging.getLogger(__name__)

# Prefill backends that attend to an MLA prefix in chunks. Public: another package's backend appends
# its name when it registers.
CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS: list[str] = [
    "flashinfer",
    "fa3",
    "fa4",
    "flashmla",
    "cutedsl_mla",
    "trtllm_mla",
    "sdpa",
    "triton",
]
SOURCE = "load-time gate"
LEAF = "disable_chunked_prefix_cache"


def maybe_disable_chunked_prefix_cache(use_mla_backend: bool, is_draft_worker: bool) -> None:
    """Turns `disable_chunked_prefix_cache` on unless the target uses MLA and its prefill backend can
    read a prefix in chunks. A draft neither reads nor writes: the bag is the target's business."""
    if is_draft_worker:
        return
    context = get_context()
    prefill = context.target.prefill_attention_backend
    reason = why_not_chunked(use_mla_backend, prefill)
    if reason is None:
        logger.info("an MLA prefix is read in chunks by prefill backend %s", prefill)
    else:
        refuse_wish(context.args, reason)
        context.override(SOURCE, reason=reason, disable_chunked_prefix_cache=True)


def refuse_wish(args: ServerArgs, reason: str) -> None:
    """Raises ConfigError if chunks were asked for, by naming their size."""
    if args.max_prefix_chunk_tokens is not None and not args.disable_chunked_prefix_cache:
        able = ", ".join(CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS)
        raise ConfigError(
            f"--max-prefix-chunk-tokens {args.max_prefix_chunk_tokens} was asked for, but {reason}; "
            f"prefill backends that read an MLA prefix in chunks: {able}"
        )


def why_not_chunked(use_mla_backend: bool, prefill_backend: str) -> str | None:
    """Why a prefix cannot be read in chunks; None if it can. Pure but for the public list."""
    if not use_mla_backend:
        return "the model's attention is not MLA"
    if prefill_backend not in CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        return f"prefill backend {prefill_backend} cannot read an MLA prefix in chunks"
    return None


def after_load(args: ServerArgs, resolution: Resolution, use_mla_backend: bool) -> Resolution:
    """What stands there once the gate has decided, without loading. A script loads nothing."""
    target = resolution.runners[0]
    reason = why_not_chunked(use_mla_backend, target.prefill_attention_backend)
    schedule = resolution.values["schedule"]
    if reason is None or target.load_format == "script":
        return resolution
    refuse_wish(args, reason)
    if schedule[LEAF]:
        return resolution
    decided = TrailEntry(
        field=f"schedule.{LEAF}", value=True, source=SOURCE, reason=reason, replaced=schedule[LEAF]
    )
    return replace(
        resolution,
        values={**resolution.values, "schedule": {**schedule, LEAF: True}},
        trail=tuple(
            decided if entry.field == decided.field else entry for entry in resolution.trail
        ),
    )
