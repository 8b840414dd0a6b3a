"""Blocks of guesses change no answer: DFLASH and DSPARK with networks that know nothing, and with ones
that are always right. And what the prefix cache keeps of a draft is what it would compute again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from request_set import all_requests, ask, long_requests, words
from whole_engine import MAX_ROWS, Engine, Outcome, Setting, expect_equal, num_retractions

from srt.config.facts import ModelFacts
from srt.protocols.drafter import Wish
from srt.runner.model_runner import ModelRunner
from srt.sampling.sampler import Sampler
from srt.scheduler.balance import Balance
from srt.scheduler.pace import Pace
from srt.spec.dflash import DflashDrafter
from srt.spec.dspark import DsparkDrafter
from srt.spec.lookup import LookupFirst
from srt.spec.ngram import NgramDrafter
from srt.verify.model_rig import spoil
from srt.wire.messages import Work
from tests.block_drafts import TinyDraft, draft_runner, make_draft

Outcomes = dict[int, Outcome]
USUAL = Setting(radix=True, depth=1, chunk=16, drafter="block", draft_tokens=5)
ALGORITHMS = ("dflash", "dspark")
PLANS: dict[str, dict[str, Any]] = {
    "static": {"threshold": 0.0, "budget": 0},
    "capped": {"threshold": 0.2, "budget": 0},
    "ragged": {"threshold": 0.0, "budget": 9},
}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody gets guesses always, however wrong they were and whatever they cost."""
    monkeypatch.setattr(Pace, "learn", lambda *_: None)
    monkeypatch.setattr(Balance, "pays", lambda *_: True)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyDraft]:
    folder = tmp_path_factory.mktemp("block-drafts")
    return {name: make_draft(folder / name, name) for name in ALGORITHMS}


class BlockEngine(Engine):
    def __init__(
        self,
        facts: ModelFacts,
        setting: Setting,
        draft: TinyDraft,
        *,
        planner: str = "static",
        answers: list[list[int]] | None = None,
        shortest: int = 0,
    ) -> None:
        """`answers`: whole texts, prompt and output; the draft guesses them wherever it meets them.
        `shortest`: the match that a lookup before it needs; 0: there is none."""
        self._tiny, self._planner, self._shortest = draft, planner, shortest
        self.told: list[torch.Tensor] = []  # the logits of every proposal
        super().__init__(facts, setting, answers=answers)

    def _draft(self, target: ModelRunner, facts: ModelFacts, setting: Setting) -> Any:
        runner = draft_runner(self._tiny, target)
        spoil(runner)
        sampler = Sampler(MAX_ROWS, facts.vocab_size)
        if self._tiny.algorithm == "dflash":
            drafter: Any = DflashDrafter(runner, sampler)
        else:
            drafter = DsparkDrafter(runner, sampler, planner=self._planner, **PLANS[self._planner])
        self._listen(drafter._blocks)
        if self._shortest:
            return LookupFirst(NgramDrafter(shortest=self._shortest), drafter, 9)
        return drafter

    def _listen(self, blocks: Any) -> None:
        states, logits = blocks.states, blocks.network.logits
        asked: list[tuple[Wish, int]] = []

        def remember(wishes: list[Wish], lengths: list[int]) -> torch.Tensor:
            asked[:] = zip(wishes, lengths, strict=True)
            found: torch.Tensor = states(wishes, lengths)
            assert bool(found.isfinite().all()) and found.abs().max() < 50
            return found

        def tell(found: torch.Tensor) -> torch.Tensor:
            told: torch.Tensor = logits(found)
            self.told.append(told.clone())
            if self._answers is not None:
                right = [
                    token
                    for wish, length in asked
                    for token in self._ahead(blocks.rows[wish.row].tokens, length)
                ]
                told[range(len(right)), right] = 1e6
            return told

        blocks.states, blocks.network.logits = remember, tell

    def _ahead(self, tokens: list[int], length: int) -> list[int]:
        assert self._answers is not None
        for answer in self._answers:
            if answer[: len(tokens)] == tokens:
                ahead = answer[len(tokens) : len(tokens) + length]
                return [*ahead, *[0] * (length - len(ahead))]
        return [0] * length


@contextmanager
def block_engine(*given: Any, **more: Any) -> Iterator[BlockEngine]:
    threads = torch.get_num_threads()
    made = BlockEngine(*given, **more)
    try:
        yield made
    finally:
        made.close()
        torch.set_num_threads(threads)


def count(made: Engine) -> tuple[int, int]:
    usages = [each.end.usage for each in made.outcomes.values()]
    return sum(u.drafted_tokens for u in usages), sum(u.accepted_tokens for u in usages)


def texts(requests: list[Work], outcomes: Outcomes) -> list[list[int]]:
    return [[*work.token_ids, *outcomes[work.uid].tokens] for work in requests]


@pytest.mark.parametrize(
    ("algorithm", "knows", "page_size", "depth"),
    list(product(ALGORITHMS, (False, True), (1, 16), (0, 1))),
)
def test_plain_equals_speculative(
    algorithm: str,
    knows: bool,
    page_size: int,
    depth: int,
    facts: ModelFacts,
    alone: Outcomes,
    drafts: dict[str, TinyDraft],
) -> None:
    requests = all_requests()
    answers = texts(requests, alone) if knows else None
    setting = replace(USUAL, page_size=page_size, depth=depth)
    with block_engine(facts, setting, drafts[algorithm], answers=answers) as made:
        expect_equal(made.run(requests[:3], requests[3:12], requests[12:]), alone)
        drafted, accepted = count(made)
    assert drafted > 100
    if knows:
        assert accepted >= 0.9 * drafted
    else:
        assert accepted < 0.2 * drafted


@pytest.mark.parametrize(
    ("planner", "knows", "depth"), list(product(("capped", "ragged"), (False, True), (0, 1)))
)
def test_no_planner_changes_an_answer(
    planner: str,
    knows: bool,
    depth: int,
    facts: ModelFacts,
    alone: Outcomes,
    drafts: dict[str, TinyDraft],
) -> None:
    requests = all_requests()
    answers = texts(requests, alone) if knows else None
    setting = replace(USUAL, depth=depth)
    with block_engine(facts, setting, drafts["dspark"], planner=planner, answers=answers) as made:
        expect_equal(made.run(requests[:3], requests[3:12], requests[12:]), alone)
        drafted, accepted = count(made)
        told = sum(len(each) for each in made.told)
    assert 20 < drafted < 0.9 * told
    if knows:
        assert accepted >= 0.9 * drafted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_lookup_may_pass_the_draft_over(
    algorithm: str, facts: ModelFacts, alone: Outcomes, drafts: dict[str, TinyDraft]
) -> None:
    """It keeps up with rows whose guesses were another's."""
    requests = all_requests()
    answers = texts(requests, alone)
    with block_engine(facts, USUAL, drafts[algorithm], answers=answers, shortest=1) as made:
        expect_equal(made.run(requests[:3], requests[3:12], requests[12:]), alone)
        drafted, accepted = count(made)
        told = sum(len(each) for each in made.told)
    assert told > 100 and accepted > 100
    assert drafted > told  # the others were looked up


@pytest.mark.parametrize(("algorithm", "depth"), list(product(ALGORITHMS, (0, 1))))
def test_retraction_resumes_exactly(
    algorithm: str,
    depth: int,
    facts: ModelFacts,
    alone: Outcomes,
    drafts: dict[str, TinyDraft],
) -> None:
    setting = replace(USUAL, depth=depth, chunk=3, kv_tokens=256, draft_tokens=4)
    chosen = [*long_requests(), *(each for each in all_requests() if each.uid in (9, 20, 23, 27))]
    answers = texts(chosen, alone)
    with block_engine(facts, setting, drafts[algorithm], answers=answers) as made:
        found = made.run(chosen)
        expect_equal(found, alone)
        assert num_retractions(found) > 0 and made.num_evicted > 0
        assert count(made)[1] > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("page_size", (1, 16))
def test_nothing_is_lost_at_the_limits(
    page_size: int, algorithm: str, facts: ModelFacts, drafts: dict[str, TinyDraft]
) -> None:
    """max_tokens 1..8, and prompts that end 0..7 tokens before the context does."""
    room = facts.context_length
    requests = [ask(400 + n, words(80, 12), n) for n in range(1, 9)]
    requests += [ask(420 + n, words(81, room - n), None) for n in range(1, 9)]
    plain = Engine(facts, Setting(max_running=1, max_step_tokens=512))
    expected: Outcomes = {}
    for work in requests:
        expected.update(plain.run([work]))
    plain.close()
    setting = replace(USUAL, page_size=page_size, draft_tokens=7, chunk=64)
    answers = texts(requests, expected)
    with block_engine(facts, setting, drafts[algorithm], answers=answers) as made:
        expect_equal(made.run(requests), expected)


@pytest.mark.parametrize(("algorithm", "knows"), list(product(ALGORITHMS, (False, True))))
def test_cached_pages_hold_the_drafts_context(
    algorithm: str,
    knows: bool,
    facts: ModelFacts,
    drafts: dict[str, TinyDraft],
) -> None:
    """A text that goes on where an answer ended finds pages that decodes filled, some of them with
    right guesses and some with wrong ones; the draft tells the same as behind pages of its own."""
    setting = replace(USUAL, page_size=4, depth=1)
    first = ask(1, words(5, 21), 30)
    with block_engine(facts, setting, drafts[algorithm]) as cold:
        answer = texts([first], cold.run([first]))[0]
    second = ask(2, [*answer[:-3], *words(6, 3)], 6)
    with block_engine(facts, setting, drafts[algorithm]) as cold:
        assert cold.run([second])[2].end.usage.cached_tokens == 0
    answers = [answer] if knows else None
    with block_engine(facts, setting, drafts[algorithm], answers=answers) as warm:
        warm.run([first])
        warm.told.clear()
        assert warm.run([second])[2].end.usage.cached_tokens > 40
    assert len(cold.told) == len(warm.told) > 0
    for told, expected in zip(warm.told, cold.told, strict=True):
        torch.testing.assert_close(told, expected, rtol=1e-3, atol=1e-3)
