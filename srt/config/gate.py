"""The load-time gate of the chunked prefix cache.

Whether the model uses MLA is known when it is loaded, and backends from outside this project add
themselves to the list after `resolve`; so this is decided while loading, before any backend is built.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from srt.config.args import ServerArgs
from srt.config.context import get_context
from srt.config.facts import Facts
from srt.config.prefix_chunks import NOT_MLA, NOTHING_TO_CHUNK, refuse, wish_of
from srt.config.resolve import Resolution
from srt.config.rules_attention import ROWS, lack_of, place_of
from srt.config.runner_spec import RunnerSpec
from srt.config.trail import TrailEntry

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
FIELD = f"schedule.{LEAF}"
# In the list for packages from outside that bring them; no backend of ours has such a name.
ELSEWHERE = frozenset({"fa3", "fa4", "flashmla", "cutedsl_mla", "trtllm_mla"})


def maybe_disable_chunked_prefix_cache(use_mla_backend: bool, is_draft_worker: bool) -> None:
    """Turns `disable_chunked_prefix_cache` on unless the target uses MLA and its prefill backend can
    read a prefix in chunks; where it can, that is noted and nothing is written. A draft neither reads
    nor writes: the bag is the target's business."""
    if is_draft_worker:
        return
    context = get_context()
    target, trail = context.target, context.trail
    prefill = target.prefill_attention_backend
    reason = why_not_chunked(use_mla_backend, prefill)
    if reason is not None:
        refuse_wish(context.args, context.facts, target, trail, reason)
        context.override(SOURCE, reason=reason, disable_chunked_prefix_cache=True)
    elif not _last(trail, FIELD).value:
        logger.info("an MLA prefix is read in chunks by prefill backend %s", prefill)
        context.note(SOURCE, LEAF, _why_chunked(prefill))


def refuse_wish(
    args: ServerArgs,
    facts: Facts,
    target: RunnerSpec,
    trail: Sequence[TrailEntry],
    reason: str,
) -> None:
    """Raises ConfigError if chunks were asked for, with the backends that could be chosen instead."""
    resolved = next(entry for entry in trail if entry.field == FIELD)
    wish = wish_of(args, resolved.source)
    if wish is None:
        return
    if reason == NOT_MLA:
        raise refuse(wish, NOTHING_TO_CHUNK, ())
    raise refuse(wish, reason, able_here(args, facts, target, trail))


def able_here(
    args: ServerArgs, facts: Facts, target: RunnerSpec, trail: Sequence[TrailEntry]
) -> list[str]:
    """Of the public list, what `--prefill-attention-backend` would take for this model on this machine,
    and what other packages added."""
    on_gpu = _last(trail, "device.device").value == "cuda"
    place = place_of(
        facts.model,
        facts.machine,
        facts.machine.gpus[0] if on_gpu else None,
        native=_last(trail, "exec.native_kernels").value,
        deterministic=args.deterministic,
        dtype=target.dtype,
        kv_cache_dtype=target.kv_cache_dtype,
    )
    return [
        name
        for name in CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
        if name not in ELSEWHERE and (name not in ROWS or lack_of(name, place, "prefill") is None)
    ]


def why_not_chunked(use_mla_backend: bool, prefill_backend: str) -> str | None:
    """Why a prefix cannot be read in chunks; None if it can. Pure but for the public list."""
    if not use_mla_backend:
        return NOT_MLA
    if prefill_backend not in CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        return f"prefill backend {prefill_backend} cannot read an MLA prefix in chunks"
    return None


def after_load(
    args: ServerArgs, facts: Facts, resolution: Resolution, use_mla_backend: bool
) -> Resolution:
    """What stands there once the gate has decided, without loading. A script loads nothing."""
    target = resolution.runners[0]
    prefill = target.prefill_attention_backend
    reason = why_not_chunked(use_mla_backend, prefill)
    schedule = resolution.values["schedule"]
    if target.load_format == "script":
        return resolution
    if reason is not None:
        refuse_wish(args, facts, target, resolution.trail, reason)
    if schedule[LEAF]:
        return resolution
    decided = TrailEntry(
        field=FIELD,
        value=reason is not None,
        source=SOURCE,
        reason=reason or _why_chunked(prefill),
        replaced=None if reason is None else False,
    )
    return replace(
        resolution,
        values={**resolution.values, "schedule": {**schedule, LEAF: decided.value}},
        trail=tuple(decided if entry.field == FIELD else entry for entry in resolution.trail),
    )


def _why_chunked(prefill_backend: str) -> str:
    return f"{prefill_backend} merges chunks of a cached MLA prefix"


def _last(trail: Sequence[TrailEntry], field: str) -> TrailEntry:
    return next(entry for entry in reversed(trail) if entry.field == field)
