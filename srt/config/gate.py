"""The load-time gate of the chunked prefix cache.

Whether the model uses MLA is known when it is loaded, and backends from outside this project add
themselves to the list after `resolve`; so this is decided while loading, before any backend is built.
"""

from __future__ import annotations

import logging

from srt.config.context import get_context

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
]
SOURCE = "load-time gate"


def maybe_disable_chunked_prefix_cache(use_mla_backend: bool, is_draft_worker: bool) -> None:
    """Turns `disable_chunked_prefix_cache` on unless the target uses MLA and its prefill backend can
    read a prefix in chunks. A draft neither reads nor writes: the bag is the target's business."""
    if is_draft_worker:
        return
    context = get_context()
    prefill = context.target.prefill_attention_backend
    if not use_mla_backend:
        reason = "the model's attention is not MLA"
    elif prefill not in CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        reason = f"prefill backend {prefill} cannot read an MLA prefix in chunks"
    else:
        logger.info("an MLA prefix is read in chunks by prefill backend %s", prefill)
        return
    context.override(SOURCE, reason=reason, disable_chunked_prefix_cache=True)
