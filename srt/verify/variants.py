"""The ways of running an engine that must not change an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from srt.scheduler.budget import MAX_GROWTH, Settings, pages_for
from srt.wire.messages import Work

GROWTH = 64  # tokens that admission reserves for an answer at first
GUESSES = 4
NO_DRAFT = (
    "no draft model was given (--speculative-algorithm standalone --speculative-draft-model M)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`rounds`: how often the requests are run, the later times with a warm cache. `about`: what must
    take place for this run to prove anything, a name of `srt.verify.evidence`. `why_not`: why it
    cannot be run here. `is_settled`: the worker's chores for quiet moments are done before."""

    name: str
    settings: Settings
    page_size: int
    num_tokens: int  # of the KV pool
    algorithm: str | None = None  # who guesses
    rounds: int = 1
    first: int | None = None  # requests that take part; None: all
    stream: bool = False
    about: str | None = None
    why_not: str | None = None
    is_settled: bool = False


def baseline(requests: Sequence[Work], page_size: int) -> Variant:
    """One request at a time, its prompt whole, nothing cached, nothing ahead."""
    longest = max(len(work.token_ids) for work in requests)
    alone = Settings(
        max_running=1,
        max_step_tokens=max(longest, 2),
        chunked_prefill_size=0,
        radix_cache=False,
        depth=0,
    )
    need = sum(need_of(work, page_size) for work in requests)
    return Variant(name="baseline", settings=alone, page_size=page_size, num_tokens=need)


def need_of(work: Work, page_size: int) -> int:
    """KV tokens of one request with all its answer, in whole pages."""
    most = len(work.token_ids) + (work.params.max_tokens or 0)
    return pages_for(most + GUESSES, page_size) * page_size


def plan(
    requests: Sequence[Work],
    *,
    page_size: int,
    algorithm: str | None,
    yours: Settings,
    no_guesses: str | None = None,
    drafter: tuple[str, int] | None = None,
) -> list[Variant]:
    """Each changes one thing for requests that run together; the last two change all of it. `yours` and
    `algorithm` are what the flags ask for. `no_guesses`: why this model cannot be guessed for.
    `drafter`: an algorithm whose draft is there unasked, and its guesses."""
    alone = baseline(requests, page_size)
    together = replace(
        alone,
        name="batching",
        about="shared",
        settings=replace(
            alone.settings,
            max_running=len(requests),
            max_step_tokens=alone.settings.max_step_tokens + len(requests),
        ),
    )

    def changed(name: str, **more: object) -> Variant:
        settings = replace(together.settings, **more)  # type: ignore[arg-type]
        return replace(together, name=name, settings=settings)

    def paged(size: int) -> Variant:
        need = sum(need_of(work, size) for work in requests)
        why_not = "the baseline's own" if size == page_size else None
        return replace(
            together, name=f"page size {size}", page_size=size, num_tokens=need, why_not=why_not
        )

    guessing = {"draft_tokens": GUESSES, "draft_budget": MAX_GROWTH, "draft_eager": True}
    ngram = replace(changed("speculation: ngram", **guessing), algorithm="ngram", about="drafted")
    guesser, guesses = drafter or (algorithm, yours.draft_tokens)
    draft = replace(ngram, name=f"speculation: {guesser}", algorithm=guesser)
    draft = replace(draft, settings=replace(draft.settings, draft_tokens=guesses))
    if guesser in (None, "ngram"):
        draft = replace(draft, name="speculation: draft", why_not=NO_DRAFT)
    everything = changed(
        "all of it",
        chunked_prefill_size=16,
        radix_cache=True,
        depth=1,
        **({} if no_guesses else guessing),
    )
    if no_guesses is not None:
        ngram, draft = (replace(each, why_not=no_guesses) for each in (ngram, draft))
    return [
        together,
        replace(changed("chunking", chunked_prefill_size=7), about="cuts"),
        replace(changed("caching", radix_cache=True), rounds=2, about="cached"),
        changed("overlap", depth=1),
        paged(1),
        paged(16),
        _short_of_memory(requests, changed("retraction", depth=1)),
        replace(together, name="streaming", stream=True, about="pieces"),
        replace(changed("latency promise", chunked_prefill_size=64, max_itl=1e-6), about="cuts"),
        ngram,
        draft,
        replace(
            everything,
            rounds=2,
            stream=True,
            algorithm=None if no_guesses else guesser or "ngram",
        ),
        replace(
            together,
            name="your settings",
            settings=yours,
            rounds=2,
            stream=True,
            algorithm=algorithm if yours.draft_tokens else None,
            is_settled=True,
        ),
    ]


def _short_of_memory(requests: Sequence[Work], variant: Variant) -> Variant:
    """The long answers only, in a pool that holds what admission reserves and not what they grow to."""
    size = variant.page_size
    growing = [work for work in requests if (work.params.max_tokens or 0) > GROWTH]
    if len(growing) < 2:
        return replace(variant, why_not="the context is too short for answers that outgrow memory")
    pages = sum(pages_for(len(work.token_ids) + GROWTH, size) for work in growing)
    return replace(variant, num_tokens=pages * size, first=len(growing), about="retractions")
