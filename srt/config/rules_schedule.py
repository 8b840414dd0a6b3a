"""How much is scheduled at once."""

from __future__ import annotations

from dataclasses import dataclass

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.rules_memory import MemoryPlan
from srt.errors import ConfigError

MAX_RUNNING = 64
CHUNK = 256
GPU_MAX_RUNNING = 256
GPU_CHUNK = 8192  # a step's tokens too: what one step computes bounds the activations' memory
LEAST_CHUNK = 16  # prompt tokens of a step, whatever --max-itl-ms says: prompts must get on
PREFIX_CHUNK = 4096
GPU_PREFIX_CHUNK = 32768
QUEUED_TOKENS = 512  # per request that may wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a device does well, and why: requests at once, prompt tokens of one request in a step.
    `shares_step`: decodes take their part of the step's tokens, else they come on top of a chunk.
    `prefix_chunk`: tokens of MLA prefixes that are expanded at once."""

    running: int
    chunk: int
    overlap: bool
    shares_step: bool
    prefix_chunk: int
    why_running: str
    why_chunk: str
    why_overlap: str


def pace_of(is_gpu: bool) -> Pace:
    if is_gpu:
        return Pace(
            running=GPU_MAX_RUNNING,
            chunk=GPU_CHUNK,
            overlap=True,
            shares_step=True,
            prefix_chunk=GPU_PREFIX_CHUNK,
            why_running="past it a GPU's step takes as much longer as it does more",
            why_chunk="fills a GPU; more would only take more memory",
            why_overlap="the next step is prepared while the GPU computes this one",
        )
    return Pace(
        running=MAX_RUNNING,
        chunk=CHUNK,
        overlap=False,
        shares_step=False,
        prefix_chunk=PREFIX_CHUNK,
        why_running="more streams than a CPU decodes well",
        why_chunk="keeps a CPU's step short while a long prompt comes in",
        why_overlap="on a CPU the next step's preparation would take a core from this one's forward",
    )


def decide_schedule(
    args: ServerArgs, memory: MemoryPlan, is_gpu: bool, decisions: Decisions
) -> int:
    """Returns how many requests may run at once."""
    pace = pace_of(is_gpu)
    running = _max_running(args, memory, pace, decisions)
    chunk = _chunk(args, memory, pace, decisions)
    step = _max_step_tokens(args, memory, running, chunk, pace, decisions)
    assert step >= max(running, chunk), (step, running, chunk)
    _prefix_chunk(args, memory, pace, decisions)
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
        pace.overlap,
        pace.why_overlap,
    )
    return running


def most_step_tokens(args: ServerArgs, context_length: int, is_gpu: bool) -> int:
    """What `max_step_tokens` will be at most, before memory has had its say."""
    pace = pace_of(is_gpu)
    running = args.max_running or pace.running
    if args.max_step_tokens is not None:
        return args.max_step_tokens
    if args.chunked_prefill_size == 0:
        return context_length + running
    return max(pace.chunk, args.chunked_prefill_size or 0) + (0 if pace.shares_step else running)


def _max_running(args: ServerArgs, memory: MemoryPlan, pace: Pace, decisions: Decisions) -> int:
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
    if step is not None and step < min(pace.running, room):
        return decisions.decide("max_running", step, f"each takes one of {step} tokens in a step")
    if room < pace.running:
        return decisions.decide("max_running", room, f"two KV pages for each, of {pages}")
    return decisions.decide("max_running", pace.running, pace.why_running)


def _chunk(args: ServerArgs, memory: MemoryPlan, pace: Pace, decisions: Decisions) -> int:
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
    if step is not None and step < max(page, pace.chunk):
        if step < page:
            raise ConfigError(
                f"--max-step-tokens {step} was asked for, but a prompt advances by pages of {page} "
                f"tokens; allowed: {page} and more; raise it or lower --page-size"
            )
        return decisions.decide("chunked_prefill_size", step, f"one step takes {step} tokens")
    if page > pace.chunk:
        return decisions.decide("chunked_prefill_size", page, "one page")
    if args.max_itl_ms is not None:
        why = "at most; --max-itl-ms takes less"
        return decisions.decide("chunked_prefill_size", pace.chunk, why)
    return decisions.decide("chunked_prefill_size", pace.chunk, pace.why_chunk)


def _prefix_chunk(args: ServerArgs, memory: MemoryPlan, pace: Pace, decisions: Decisions) -> None:
    asked, page = args.max_prefix_chunk_tokens, memory.page_size
    if asked is not None and asked < page:
        raise ConfigError(
            f"--max-prefix-chunk-tokens {asked} was asked for, but a page holds {page} tokens and a "
            f"chunk of a prefix at least one; allowed: {page} and more; raise it or lower --page-size"
        )
    decisions.choose(
        "max_prefix_chunk_tokens",
        asked,
        max(page, pace.prefix_chunk),
        "bounds the memory of K and V made of an MLA prefix; more would not be faster",
    )


def _max_step_tokens(
    args: ServerArgs,
    memory: MemoryPlan,
    running: int,
    chunk: int,
    pace: Pace,
    decisions: Decisions,
) -> int:
    asked, context = args.max_step_tokens, memory.context_length
    if asked is None and chunk and pace.shares_step:
        step = max(chunk, running, pace.chunk)
        why = "decodes take their part of it, prompts the rest; it bounds the activations' memory"
        return decisions.decide("max_step_tokens", step, why)
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
