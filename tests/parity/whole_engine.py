"""The real scheduler over the real worker in one process, without sockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.native_build import Library
from kernels.ops import select
from srt.config.facts import ModelFacts
from srt.protocols.forward_batch import RowSetup
from srt.protocols.grammar import Grammars
from srt.protocols.worker import WorkerFacts
from srt.runner.model_runner import ModelRunner
from srt.runner.tp_worker import TpModelWorker
from srt.sampling.sampler import Sampled, Sampler
from srt.scheduler.budget import Settings
from srt.scheduler.build import build_store
from srt.scheduler.loop import Scheduler
from srt.spec.ngram import NgramDrafter
from srt.spec.standalone import StandaloneDrafter
from srt.spec.worker import SpeculativeWorker
from srt.wire.codec import encode, step
from srt.wire.messages import Message, TokenItem, Tokens, Work
from srt.wire.params import Finish, TokenLogprobs
from tests.tiny_models import make_spec

MAX_ROWS = 12
LIMIT = 20000  # turns; far more than any run here needs


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run the engine. What is not named is what the lone request's run uses."""

    page_size: int = 16
    kv_tokens: int = 16384
    chunk: int = 0
    radix: bool = False
    depth: int = 0
    policy: str = "fcfs"
    eviction: str = "lru"
    max_running: int = MAX_ROWS
    max_step_tokens: int = 96
    implementation: str = "torch"
    prefill: str = "sdpa"
    decode: str = "sdpa"
    dtype: str = "float32"
    num_threads: int = 1
    drafter: str | None = None  # ngram, self: the target itself, random: another model
    draft_tokens: int = 4


@dataclass(slots=True)
class Outcome:
    """Everything a request was told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def end(self) -> Finish:
        assert self.finish is not None, "a request has no end"
        return self.finish

    def take(self, item: TokenItem) -> None:
        assert self.finish is None, "a request goes on after its end"
        self.tokens += item.tokens
        self.logprobs += item.logprobs or []
        if item.prompt_logprobs is not None:
            assert not self.prompt_logprobs, "prompt logprobs come once"
            self.prompt_logprobs = item.prompt_logprobs
        self.finish = item.finish


class Dictated(Sampler):
    """Puts out given tokens, whatever the logits say, and keeps those: [V] by (seed, position). So two
    engines can be compared position by position where rounding lets their own choices part."""

    def __init__(self, max_rows: int, vocab_size: int, script: dict[int, list[int]]) -> None:
        super().__init__(max_rows, vocab_size)
        self.script = script  # tokens by seed
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        self._at: dict[int, tuple[int, int]] = {}

    def open(self, setups: list[RowSetup]) -> None:
        for setup in setups:
            self._at[setup.row] = (setup.params.seed or 0, len(setup.tokens) - setup.prompt_len)

    def sample(
        self, logits: torch.Tensor, rows: list[int], masks: list[bytes | None] | None = None
    ) -> Sampled:
        tokens = []
        for row, values in zip(rows, logits, strict=True):
            seed, position = self._at[row]
            self._at[row] = (seed, position + 1)
            self.seen[seed, position] = values.clone()
            script = self.script[seed]
            tokens.append(script[position] if position < len(script) else 0)
        nothing = [None] * len(rows)
        return Sampled(tokens=torch.tensor(tokens), logprobs=[*nothing], errors=[*nothing])


class Engine:
    """`run` answers requests; what is cached stays for the next `run`."""

    def __init__(
        self,
        facts: ModelFacts,
        setting: Setting,
        library: Library | None = None,
        sampler: Sampler | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.started: list[int] = []  # uids in order of their first token
        self.num_evicted = 0
        self._now = 0.0
        self._sampler = sampler or Sampler(MAX_ROWS, facts.vocab_size)
        self._decoder = step()
        self._thread = ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(setting.num_threads,)
        )
        self.worker = self._thread.submit(self._build, facts, setting, library).result()
        settings = Settings(
            max_running=setting.max_running,
            max_step_tokens=setting.max_step_tokens,
            chunked_prefill_size=setting.chunk,
            policy=setting.policy,
            depth=1 if setting.depth else 0,
            radix_cache=setting.radix,
            eviction_policy=setting.eviction,
            draft_tokens=setting.draft_tokens if setting.drafter else 0,
            draft_budget=1000,
        )
        self.store = build_store(self.worker.facts, settings)
        evict = self.store.cache.evict

        def counted(num_pages: int) -> list[int]:
            freed = evict(num_pages)
            self.num_evicted += len(freed)
            return freed

        self.store.cache.evict = counted  # type: ignore[method-assign]
        self.scheduler = Scheduler(
            worker=self.worker,
            store=self.store,
            outbox=self,
            settings=settings,
            clock=self._clock,
            grammars=grammars,
        )

    def _build(
        self, facts: ModelFacts, setting: Setting, library: Library | None
    ) -> TpModelWorker | SpeculativeWorker:
        runner = ModelRunner(
            make_spec(
                facts,
                dtype=setting.dtype,
                prefill_attention_backend=setting.prefill,
                decode_attention_backend=setting.decode,
            ),
            facts,
            ops=select(setting.implementation, library),
            device=torch.device("cpu"),
            seed=0,
        )
        runner.load()
        worker_facts = WorkerFacts(
            vocab_size=facts.vocab_size,
            context_length=facts.context_length,
            num_pages=1 + setting.kv_tokens // setting.page_size,
            page_size=setting.page_size,
            max_rows=MAX_ROWS,
            end_token_ids=facts.end_token_ids,
            memory_bytes={},
        )
        runner.allocate(
            num_pages=worker_facts.num_pages, page_size=setting.page_size, max_rows=MAX_ROWS
        )
        # What was never written must never be read: there it is wrong enough to be seen.
        for layer in range(runner.arch.num_layers):
            runner.pool.keys(layer)[setting.page_size :].fill_(50.0)
            runner.pool.values(layer)[setting.page_size :].fill_(50.0)
        runner.init_backends()
        target = TpModelWorker(runner, self._sampler, worker_facts, self._thread)
        if setting.drafter is None:
            return target
        if setting.drafter == "ngram":
            return SpeculativeWorker(target, NgramDrafter())
        return SpeculativeWorker(target, self._draft(runner, facts, setting))

    def _draft(self, target: ModelRunner, facts: ModelFacts, setting: Setting) -> StandaloneDrafter:
        """The target itself guesses all right; a model of other weights hardly ever."""
        load_format = "dummy" if setting.drafter == "random" else facts.format
        runner = ModelRunner(
            make_spec(facts, role="draft", load_format=load_format),
            facts,
            ops=select("torch"),
            device=torch.device("cpu"),
            seed=5,
        )
        runner.load()
        runner.allocate(
            num_pages=target.pool.num_pages,
            page_size=setting.page_size,
            max_rows=MAX_ROWS,
            table=target.table,
        )
        runner.init_backends()
        return StandaloneDrafter(runner, Sampler(MAX_ROWS, facts.vocab_size))

    def _clock(self) -> float:
        self._now += 0.001
        return self._now

    def send(self, message: Message) -> None:
        """What the scheduler puts out, by way of the wire."""
        message = self._decoder.decode(encode(message))
        if isinstance(message, Tokens):
            for item in message.items:
                outcome = self.outcomes.setdefault(item.uid, Outcome())
                if item.tokens and not outcome.tokens:
                    self.started.append(item.uid)
                outcome.take(item)

    def close(self) -> None:
        self.worker.close()

    def run(self, *waves: Sequence[Work]) -> dict[int, Outcome]:
        """Each wave arrives two turns after the one before; the outcomes of all of them."""
        for wave in waves:
            self.scheduler.turn(list(wave))
            self.scheduler.turn([])
        turns = 0
        while self.scheduler.turn([]):
            turns += 1
            assert turns < LIMIT, "the scheduler does not come to an end"
        assert self.scheduler.audit() == []
        return {work.uid: self.outcomes[work.uid] for wave in waves for work in wave}


@contextmanager
def engine(
    facts: ModelFacts,
    setting: Setting,
    library: Library | None = None,
    sampler: Sampler | None = None,
    grammars: Grammars | None = None,
) -> Iterator[Engine]:
    """Closed behind you, and torch's threads are as many as before."""
    threads = torch.get_num_threads()
    made = Engine(facts, setting, library, sampler, grammars)
    try:
        yield made
    finally:
        made.close()
        torch.set_num_threads(threads)


def num_retractions(outcomes: dict[int, Outcome]) -> int:
    return sum(each.end.timing.retractions for each in outcomes.values() if each.end.timing)


def num_cached(outcomes: dict[int, Outcome]) -> int:
    return sum(each.end.usage.cached_tokens for each in outcomes.values())


def expect_equal(
    found: dict[int, Outcome], expected: dict[int, Outcome], shift: int = 0, tolerance: float = 1e-4
) -> None:
    """Tokens and ends to the bit, log-probabilities within the tolerance. `shift`: how far the uids of
    `found` lie above those of `expected`."""
    assert {uid - shift for uid in found} <= set(expected)
    for uid, outcome in found.items():
        wanted = expected[uid - shift]
        assert outcome.tokens == wanted.tokens, f"request {uid}"
        assert outcome.end.reason == wanted.end.reason, f"request {uid}"
        assert outcome.end.matched == wanted.end.matched, f"request {uid}"
        assert outcome.end.failure is None
        assert outcome.end.usage.prompt_tokens == wanted.end.usage.prompt_tokens
        assert outcome.end.usage.completion_tokens == wanted.end.usage.completion_tokens
        _expect_near(outcome.logprobs, wanted.logprobs, tolerance, f"request {uid}")
        _expect_near(
            outcome.prompt_logprobs, wanted.prompt_logprobs, tolerance, f"prompt of request {uid}"
        )


def _expect_near(
    found: Sequence[TokenLogprobs | None],
    wanted: Sequence[TokenLogprobs | None],
    tolerance: float,
    name: str,
) -> None:
    assert len(found) == len(wanted), name
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one is None) == (other is None), f"{name}, {place}"
        if one is None or other is None:
            continue
        assert [e.token for e in _entries(one)] == [e.token for e in _entries(other)], (
            f"{name}, {place}"
        )
        for entry, its in zip(_entries(one), _entries(other), strict=True):
            gap = abs(entry.logprob - its.logprob)
            assert gap <= tolerance, f"{name}, {place}: {entry} and {its}"


def _entries(each: TokenLogprobs) -> list[Any]:
    return [each.chosen, *each.top]
