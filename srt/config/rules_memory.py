"""How long a context may be and how much KV cache there is.

KV bytes of a token = 2 (K and V) * layers * KV heads * head dim * bytes of the KV type. The budget pays
for the padding page too, which `max_total_tokens` does not count. What there is to share out, on a CPU
and on a GPU, is `rooms`' business; on a GPU all this is an estimate that loading corrects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from srt.config.args import ServerArgs
from srt.config.decisions import Decisions
from srt.config.facts import Facts
from srt.config.inkling import SMALLEST_PAGE, is_inkling
from srt.config.rooms import Room, megabytes
from srt.config.rules_model import ModelPlan
from srt.errors import ConfigError

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Tokens: in a page, in one request at most, in the whole pool."""

    page_size: int
    context_length: int
    max_total_tokens: int


def decide_memory(
    args: ServerArgs, facts: Facts, plan: ModelPlan, room: Room, decisions: Decisions
) -> MemoryPlan:
    """Sizes the pool from what `room` holds. Raises ConfigError if one request of the context length
    cannot fit."""
    page = decisions.choose(
        "page_size",
        args.page_size,
        PAGE_SIZE,
        "half a page is lost per request, and page tables stay short",
    )
    if is_inkling(facts.model.architecture) and page < SMALLEST_PAGE:
        raise ConfigError(
            f"--page-size {page} was asked for, but a page also keeps the state of short convolutions; "
            f"allowed for {facts.model.name}: {SMALLEST_PAGE} and more"
        )
    context = _context_length(args, facts, plan, page, room, decisions)
    need = _round_up(context, page)
    tokens = _max_total_tokens(args, plan, page, context, need, room, decisions)
    return MemoryPlan(page_size=page, context_length=context, max_total_tokens=tokens)


def _context_length(
    args: ServerArgs, facts: Facts, plan: ModelPlan, page: int, room: Room, decisions: Decisions
) -> int:
    most = facts.model.context_length
    asked = args.context_length
    if asked is not None and asked > most:
        raise ConfigError(
            f"--context-length {asked} was asked for, but {facts.model.name} was made for {most} "
            f"tokens; allowed: 1 to {most}; lower --context-length or leave it out"
        )
    is_memory_given = args.kv_memory_gb is not None or args.max_total_tokens is not None
    fits = _usable(room.for_context, plan.bytes_per_token, page)
    wanted = most if asked is None else asked
    if is_memory_given or fits >= _round_up(wanted, page):
        return decisions.choose(
            "context_length", asked, most, "what the model was made for", source="model"
        )
    if asked is not None or fits < page:
        need = _cost(_round_up(wanted, page), plan.bytes_per_token, page)
        raise ConfigError(
            f"one context of {wanted} tokens needs {megabytes(need)} of KV cache, but "
            f"{megabytes(room.for_context)} can be had {room.beside}; "
            + (f"lower --context-length to {fits} or less, or " if fits >= page else "")
            + room.remedy
        )
    return decisions.decide(
        "context_length",
        fits,
        f"the model was made for {most}, but {room.name} holds the KV cache of {fits} tokens",
    )


def _max_total_tokens(
    args: ServerArgs,
    plan: ModelPlan,
    page: int,
    context: int,
    need: int,
    room: Room,
    decisions: Decisions,
) -> int:
    per_token, asked = plan.bytes_per_token, args.max_total_tokens
    if args.kv_memory_gb is not None:
        decisions.take("kv_memory_gb", args.kv_memory_gb)
        flag, budget = f"--kv-memory-gb {args.kv_memory_gb:g}", round(args.kv_memory_gb * 1e9)
        cost = 0 if asked is None else _cost(asked, per_token, page)
        if cost > budget:
            raise ConfigError(
                f"--max-total-tokens {asked} needs {megabytes(cost)}, but {flag} allows "
                f"{megabytes(budget)}; allowed: up to {_usable(budget, per_token, page)} tokens; "
                "change one of the two"
            )
    elif asked is not None:
        flag, budget = f"--max-total-tokens {asked}", _cost(asked, per_token, page)
        decisions.decide("kv_memory_gb", budget / 1e9, f"what {flag} takes")
    else:
        budget, reason = room.usual(_cost(need, per_token, page))
        flag = ""
        decisions.decide("kv_memory_gb", budget / 1e9, reason)
    if flag:
        _check_room(flag, budget, room, plan, page)
    if asked is None:
        tokens = _usable(budget, per_token, page)
    else:
        flag, tokens = f"--max-total-tokens {asked}", asked // page * page
    if tokens < need:
        has = _cost(tokens, per_token, page) if asked else budget
        cost = _cost(need, per_token, page)
        enough = f"{need}" if asked else f"{math.ceil(cost / 1e6) / 1e3:.3f}"
        usable = f", or set --context-length to {tokens} or less" if tokens else ""
        raise ConfigError(
            f"the KV cache is too small for one context: {context} tokens need "
            f"{megabytes(cost)}, {flag} gives {megabytes(has)}; raise it to {enough} or more{usable}"
        )
    if asked is not None:
        if tokens == asked:
            return decisions.take("max_total_tokens", asked)
        return decisions.decide(
            "max_total_tokens", tokens, f"{asked} was asked for; whole pages of {page}"
        )
    most = tokens if room.most_tokens is None else max(need, room.most_tokens // page * page)
    if tokens > most:
        return decisions.decide(
            "max_total_tokens",
            most,
            f"{megabytes(budget)} would hold {tokens}; this many are plenty",
        )
    return decisions.decide(
        "max_total_tokens",
        tokens,
        f"{megabytes(budget)} at {per_token} bytes a token, in whole pages of {page}",
    )


def _check_room(flag: str, budget: int, room: Room, plan: ModelPlan, page: int) -> None:
    """Who names a budget may have all that is left, and not what is not there."""
    if budget <= room.most:
        return
    tokens = _usable(room.most, plan.bytes_per_token, page)
    usable = (
        f"--kv-memory-gb {math.floor(room.most / 1e6) / 1e3:.3f} or --max-total-tokens {tokens}"
        if tokens
        else f"nothing: {room.remedy}"
    )
    raise ConfigError(
        f"{flag} needs {megabytes(budget)} for the KV cache, but {room.taken}; the most that fits: "
        f"{usable}"
    )


def _cost(tokens: int, per_token: int, page: int) -> int:
    """Bytes of whole pages for `tokens`, and of the padding page."""
    return (_round_up(tokens, page) + page) * per_token


def _usable(budget: int, per_token: int, page: int) -> int:
    """Tokens in whole pages that a budget holds beside the padding page."""
    return max(0, budget // per_token // page - 1) * page


def _round_up(tokens: int, page: int) -> int:
    return -(-tokens // page) * page
