"""How much is scheduled at once."""

from __future__ import annotations

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.rules_memory import MemoryPlan
from srt.errors import ConfigError

MAX_RUNNING = 64
CHUNK = 256
LEAST_CHUNK = 16  # prompt tokens of a step, whatever --max-itl-ms says: prompts must get on
QUEUED_TOKENS = 512  # per request that may wait


def decide_schedule(args: ServerArgs, memory: MemoryPlan, decisions: Decisions) -> None:
    running = _max_running(args, memory, decisions)
    chunk = _chunk(args, memory, decisions)
    step = _max_step_tokens(args, memory, running, chunk, decisions)
    assert step >= max(running, chunk), (step, running, chunk)
    decisions.choose(
        "max_queued_tokens",
        args.max_queued_tokens,
        max(memory.context_length, args.max_queued * QUEUED_TOKENS),
        f"{QUEUED_TOKENS} for each of the {args.max_queued} requests that may wait",
    )
    if args.max_itl_ms is None:
        decisions.decide("max_itl_ms", None, "off unless asked for: steps are bounded by tokens")
    else:
        source, reason = decisions.asked("max_itl_ms")
        reason += (
            f"; a step takes {LEAST_CHUNK} prompt tokens beside decodes, or as many as are in time"
        )
        decisions.decide("max_itl_ms", args.max_itl_ms, reason, source=source)
    decisions.choose(
        "overlap",
        args.overlap,
        False,
        "on a CPU the next step's preparation would take a core from this one's forward",
    )


def _max_running(args: ServerArgs, memory: MemoryPlan, decisions: Decisions) -> int:
    pages = memory.max_total_tokens // memory.page_size
    if args.max_running is not None:
        if args.max_running > pages:
            raise ConfigError(
                f"--max-running {args.max_running} was asked for, but the KV cache has {pages} pages "
                f"and every running request needs one; allowed: 1 to {pages}; lower --max-running or "
                "raise --kv-memory-gb"
            )
        return decisions.take("max_running", args.max_running)
    step = args.max_step_tokens
    room = max(1, pages // 2)
    if step is not None and step < min(MAX_RUNNING, room):
        return decisions.decide("max_running", step, f"each takes one of {step} tokens in a step")
    if room < MAX_RUNNING:
        return decisions.decide("max_running", room, f"two KV pages for each, of {pages}")
    return decisions.decide("max_running", MAX_RUNNING, "more streams than a CPU decodes well")


def _chunk(args: ServerArgs, memory: MemoryPlan, decisions: Decisions) -> int:
    page, step, asked = memory.page_size, args.max_step_tokens, args.chunked_prefill_size
    if asked:
        if asked < page:
            raise ConfigError(
                f"--chunked-prefill-size {asked} was asked for, but a page holds {page} tokens and a "
                f"chunk fills at least one; allowed: 0 (whole prompts) or {page} and more; raise it "
                "or lower --page-size"
            )
        if step is not None and asked > step:
            raise ConfigError(
                f"--chunked-prefill-size {asked} was asked for, but --max-step-tokens {step} is the "
                f"most one step takes; allowed: {page} to {step}; change one of the two"
            )
    if asked == 0 and args.max_itl_ms is not None:
        raise ConfigError(
            f"--max-itl-ms {args.max_itl_ms:g} was asked for with --chunked-prefill-size 0, but whole "
            f"prompts cannot be fitted into a time; allowed: {page} and more; change one of the two"
        )
    if asked is not None:
        return decisions.take("chunked_prefill_size", asked)
    if step is not None and step < max(page, CHUNK):
        if step < page:
            raise ConfigError(
                f"--max-step-tokens {step} was asked for, but a prompt advances by pages of {page} "
                f"tokens; allowed: {page} and more; raise it or lower --page-size"
            )
        return decisions.decide("chunked_prefill_size", step, f"one step takes {step} tokens")
    if page > CHUNK:
        return decisions.decide("chunked_prefill_size", page, "one page")
    if args.max_itl_ms is not None:
        return decisions.decide("chunked_prefill_size", CHUNK, "at most; --max-itl-ms takes less")
    return decisions.decide(
        "chunked_prefill_size", CHUNK, "keeps a CPU's step short while a long prompt comes in"
    )


def _max_step_tokens(
    args: ServerArgs, memory: MemoryPlan, running: int, chunk: int, decisions: Decisions
) -> int:
    asked, context = args.max_step_tokens, memory.context_length
    if asked is None:
        return decisions.decide(
            "max_step_tokens",
            (chunk or context) + running,
            f"{running} decoding and one {'chunk' if chunk else 'whole prompt'} beside them",
        )
    if asked < running:
        raise ConfigError(
            f"--max-step-tokens {asked} was asked for, but --max-running {running} requests decode one "
            f"token each in a step; allowed: {running} and more; change one of the two"
        )
    if chunk == 0 and asked < context:
        raise ConfigError(
            f"--max-step-tokens {asked} was asked for with --chunked-prefill-size 0, but a whole "
            f"prompt may have {context} tokens; allowed: {context} and more, or a chunk size"
        )
    return decisions.take("max_step_tokens", asked)
