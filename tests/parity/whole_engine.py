"""The real scheduler over the real worker in one process, with a model of a test's choice: the driver
of `tandem verify`, and comparisons down to log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.native_build import Library
from kernels.ops import select
from srt.config.facts import ModelFacts
from srt.models.draft import DraftFamily
from srt.models.eagle import Eagle
from srt.models.eagle3 import Eagle3
from srt.models.mtp import Mtp
from srt.protocols.drafter import Drafter
from srt.protocols.forward_batch import RowSetup
from srt.protocols.grammar import Grammars
from srt.protocols.worker import WorkerFacts
from srt.runner.model_runner import ModelRunner
from srt.runner.tp_worker import TpModelWorker
from srt.sampling.sampler import Sampled, Sampler
from srt.scheduler.budget import Settings
from srt.spec.eagle import EagleDrafter
from srt.spec.lookup import LookupFirst
from srt.spec.multi_layer import MultiLayerDrafter
from srt.spec.ngram import NgramDrafter
from srt.spec.standalone import StandaloneDrafter
from srt.spec.worker import SpeculativeWorker
from srt.verify.compare import find_differences
from srt.verify.driver import Driver, Outcome
from srt.verify.model_rig import spoil
from srt.wire.params import TokenLogprobs
from tests.tiny_models import make_spec

MAX_ROWS = 12


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
    # ngram, self: the target itself, random: another model, eagle, eagle3, multi_layer
    drafter: str | None = None
    draft_tokens: int = 4
    topk: int = 1  # branches of trees
    lookup: bool = False  # before one that reads features


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


class Knowing(EagleDrafter):
    """Guesses what it was told, in trees never as the first branch."""

    def __init__(
        self, runner: ModelRunner, sampler: Sampler, answers: list[list[int]], **shape: int
    ) -> None:
        """`answers`: whole texts, prompt and output."""
        super().__init__(runner, sampler, confidence=0.0, **shape)
        self._answers = answers

    def _next(self, row: int, guesses: list[int]) -> int:
        tokens = [*self._rows[row].tokens, *guesses]
        for answer in self._answers:
            if len(answer) > len(tokens) and answer[: len(tokens)] == tokens:
                return answer[len(tokens)]
        return 0

    def _draw(self, logits: torch.Tensor, rows: list[int]) -> tuple[list[int], list[float]]:
        tokens = [self._next(row, self._rows[row].guess) for row in rows]
        for row, token in zip(rows, tokens, strict=True):
            self._rows.sampler.advance(row, [token])
        return tokens, [1.0] * len(rows)

    def _branches(
        self, logits: torch.Tensor, paths: list[tuple[int, list[int]]]
    ) -> list[tuple[list[int], list[float]]]:
        found = []
        for tokens, scores in super()._branches(logits, paths):
            row, guesses = paths[len(found)]
            others = [token for token in tokens if token != self._next(row, guesses)]
            kept = [*others[: self._topk - 1], self._next(row, guesses)]
            found.append((kept, [*scores[: len(kept) - 1], -0.1]))
        return found


class Engine(Driver):
    """A driver that owns its worker and counts what the cache gives back."""

    def __init__(
        self,
        facts: ModelFacts,
        setting: Setting,
        library: Library | None = None,
        sampler: Sampler | None = None,
        grammars: Grammars | None = None,
        answers: list[list[int]] | None = None,
        draft: ModelFacts | None = None,
    ) -> None:
        """`draft`: a stored one for eagle or multi_layer; None: random weights."""
        self._answers = answers
        self._stored = draft
        self.num_evicted = 0
        self._sampler = sampler or Sampler(MAX_ROWS, facts.vocab_size)
        self._thread = ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(setting.num_threads,)
        )
        worker = self._thread.submit(self._build, facts, setting, library).result()
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
        super().__init__(worker, settings, grammars=grammars)
        self.worker: TpModelWorker | SpeculativeWorker = worker
        evict = self.store.cache.evict

        def counted(num_pages: int) -> list[int]:
            freed = evict(num_pages)
            self.num_evicted += len(freed)
            return freed

        self.store.cache.evict = counted  # type: ignore[method-assign]

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
        spoil(runner)
        runner.init_backends()
        target = TpModelWorker(runner, self._sampler, worker_facts, self._thread)
        if setting.drafter is None:
            return target
        if setting.drafter == "ngram":
            return SpeculativeWorker(target, NgramDrafter())
        if setting.drafter == "eagle3":
            return self._guessing(target, self._eagle3(runner, facts, setting), setting)
        if setting.drafter == "eagle":
            return self._guessing(target, self._eagle(runner, facts, setting), setting)
        if setting.drafter == "multi_layer":
            return self._guessing(target, self._multi_layer(runner, facts, setting), setting)
        return SpeculativeWorker(target, self._draft(runner, facts, setting))

    @staticmethod
    def _guessing(target: TpModelWorker, drafter: Drafter, setting: Setting) -> SpeculativeWorker:
        if setting.lookup:
            drafter = LookupFirst(NgramDrafter(shortest=3), drafter, 3)
        return SpeculativeWorker(target, drafter)

    def _eagle3(self, target: ModelRunner, facts: ModelFacts, setting: Setting) -> EagleDrafter:
        """A network of random weights, or with `answers` one that is right wherever they are known."""
        config = {
            **facts.config,
            "draft_vocab_size": facts.vocab_size - 7,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        }
        facts = replace(facts, architecture="LlamaForCausalLMEagle3", num_layers=1, config=config)
        runner = self._network(Eagle3(), target, facts, setting)
        sampler = Sampler(MAX_ROWS, facts.vocab_size)
        steps = setting.draft_tokens if setting.topk == 1 else 3
        shape = {"steps": steps, "topk": setting.topk}
        if self._answers is None:
            return EagleDrafter(runner, sampler, confidence=0.0, **shape)
        return Knowing(runner, sampler, self._answers, **shape)

    def _eagle(self, target: ModelRunner, facts: ModelFacts, setting: Setting) -> EagleDrafter:
        """With random weights of two layers, so that there is more than one plane of KV."""
        its = self._stored or replace(facts, num_layers=2)
        return EagleDrafter(
            self._network(Eagle(), target, its, setting),
            Sampler(MAX_ROWS, facts.vocab_size),
            steps=setting.draft_tokens if setting.topk == 1 else 3,
            topk=setting.topk,
            confidence=0.0,
        )

    def _multi_layer(
        self, target: ModelRunner, facts: ModelFacts, setting: Setting
    ) -> MultiLayerDrafter:
        its = self._stored or replace(facts, num_layers=1)
        return MultiLayerDrafter(
            [
                self._network(Mtp(step), target, its, setting, step)
                for step in range(setting.draft_tokens)
            ],
            Sampler(MAX_ROWS, facts.vocab_size),
            confidence=0.0,
        )

    def _network(
        self,
        family: DraftFamily,
        target: ModelRunner,
        facts: ModelFacts,
        setting: Setting,
        step: int | None = None,
    ) -> ModelRunner:
        spec = make_spec(
            facts,
            role="draft",
            load_format=facts.format if self._stored else "dummy",
            dtype=setting.dtype,
            prefill_attention_backend=setting.prefill,
            decode_attention_backend=setting.decode,
            step=step,
        )
        runner = ModelRunner(
            spec,
            facts,
            ops=target.ops,
            device=torch.device("cpu"),
            seed=6,
            network=family,
            lent=target.lend(),
        )
        runner.load()
        runner.allocate(
            num_pages=target.pool.num_pages,
            page_size=setting.page_size,
            max_rows=MAX_ROWS,
            table=target.table,
        )
        runner.init_backends()
        return runner

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

    def close(self) -> None:
        self.worker.close()


@contextmanager
def engine(
    facts: ModelFacts,
    setting: Setting,
    library: Library | None = None,
    sampler: Sampler | None = None,
    grammars: Grammars | None = None,
    answers: list[list[int]] | None = None,
    draft: ModelFacts | None = None,
) -> Iterator[Engine]:
    """Closed behind you, and torch's threads are as many as before."""
    threads = torch.get_num_threads()
    made = Engine(facts, setting, library, sampler, grammars, answers, draft)
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
    assert not find_differences({uid - shift: each for uid, each in found.items()}, expected)
    for uid, outcome in found.items():
        wanted = expected[uid - shift]
        assert outcome.end.failure is None
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
