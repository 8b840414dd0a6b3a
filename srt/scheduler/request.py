"""A live request: what it asked, how far it is, what it holds and why it waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from srt.cache.lease import Lease
from srt.protocols.forward_batch import LookAhead
from srt.wire.messages import Work
from srt.wire.params import CacheReport, SamplingParams, Timing, TokenLogprobs, Usage


class State(Enum):
    WAITING = "waiting"  # holds nothing
    PREFILLING = "prefilling"  # holds a row and pages; not all of its tokens are launched
    RUNNING = "running"  # one token a step
    FINISHED = "finished"  # holds nothing, its terminal item is made


class Reason(Enum):
    """Why a request did not go ahead in the last turn. Exactly one at a time."""

    ARRIVED = "arrived"  # not looked at yet
    ROWS = "rows"  # as many requests run as may
    PAGES = "pages"  # its prompt and the growth of those that run need more KV pages
    TOKEN_BUDGET = "token_budget"  # this step's tokens are given away
    PROMISE = "itl_promise"  # more of a prompt would make the running requests' tokens late
    CHUNK_BUDGET = (
        "chunk_budget"  # its prompt goes whole, and does not fit what is left of the step
    )
    FAIRNESS = "fairness"  # its tenant has had more than its share; another one's turn
    BEHIND = "behind"  # somebody ahead of it is blocked
    LEADER = "leader"  # another sample of the same prompt prefills for it
    COOL_DOWN = "cool_down"  # retracted a moment ago
    GRAMMAR = "grammar"  # its grammar is being compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A reason with its numbers. Several requests may share one object."""

    reason: Reason
    needed: int = 0  # of what the reason names: rows, pages or tokens
    free: int = 0
    evictable: int = 0  # pages
    behind: int | None = None  # uid of whom it waits for


ARRIVED = Refusal(reason=Reason.ARRIVED)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Owned by the scheduler. Fields below `state` are written by the stages in brackets.

    `tokens` is the prompt and every token received from the worker. `computed` counts the positions
    whose KV has been launched, and `in_flight` the samples launched and not yet received, so a
    running request is `len(tokens) + in_flight` long as far as the worker is concerned. What a step
    asks of every request is a plain field.
    """

    work: Work
    sequence: int  # arrival order, engine-wide
    arrived: float  # clock seconds
    deadline: float | None  # clock seconds
    max_output: int  # tokens it may generate at most, limits of context and pool applied
    stop_ids: frozenset[int]
    tokens: list[int]
    prompt_len: int
    uid: int = field(init=False)
    tenant: str = field(init=False)
    params: SamplingParams = field(init=False)
    limit: int = field(init=False)  # how long it may become, prompt included
    # Whether it is in the metrics of requests and their tokens: all but probes of health are.
    is_counted: bool = field(init=False)
    state: State = State.WAITING
    refusal: Refusal | None = ARRIVED
    # [admission]
    lease: Lease | None = None
    admitted: float | None = None  # first admission
    admission: int = 0  # number of the latest admission, engine-wide
    cached_tokens: int = 0  # prompt tokens not computed, at the first admission
    cache: CacheReport | None = None
    needs_setup: bool = False
    overtaken: int = 0  # requests of its tenant that came later and were admitted before it
    # [prefill, decode, retraction]
    computed: int = 0
    in_flight: int = 0
    retractions: int = 0
    cool_until: int = 0  # step number
    # [grammar]
    allowed: bytes | None = None  # what may follow `tokens`; None: anything, or not known yet
    look_ahead: LookAhead | None = None  # with a grammar: what may follow guesses
    # [receive]
    is_shared: bool = False  # its prompt was offered to the cache
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # collected, not yet sent
    first_token: float | None = None
    last_token: float | None = None
    # [speculation]
    draft_length: int | None = None  # guesses it gets next time; None: it had none yet
    draft_misses: int = 0  # verifications in a row in which no guess was right
    draft_wait: int = 0  # decode steps without guesses still to come
    num_drafted: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        work = self.work
        self.uid, self.tenant, self.params = work.uid, work.tenant, work.params
        self.limit = self.prompt_len + self.max_output
        self.is_counted = not work.is_probe

    @property
    def awaits_grammar(self) -> bool:
        return self.params.grammar is not None and self.allowed is None

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def length(self) -> int:
        """Tokens the worker has, or will have when what is launched is done."""
        return len(self.tokens) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens it may still generate beyond what is launched."""
        return self.limit - len(self.tokens) - self.in_flight

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_len,
            completion_tokens=self.output_len,
            cached_tokens=self.cached_tokens,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
        )

    def timing(self, now: float) -> Timing:
        admitted = now if self.admitted is None else self.admitted
        first = admitted if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        if self.admitted is not None and self.first_token is None:
            first = last = now
        return Timing(
            queue=admitted - self.arrived,
            prefill=first - admitted,
            decode=last - first,
            retractions=self.retractions,
        )


@dataclass(slots=True)
class Roster:
    """Everybody alive: `live` by uid, and of these the `active` ones (with a row) in the order of
    their admission. The waiting ones are in the queue."""

    live: dict[int, Request] = field(default_factory=dict)
    active: list[Request] = field(default_factory=list)
