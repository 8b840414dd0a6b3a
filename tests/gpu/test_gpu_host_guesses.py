"""Guesses that the host hands to a GPU, and what the host's sampler does with its logits: whatever a
request may ask for, the answers are those without guesses.

A chain's sums do not depend on what was guessed where --deterministic rules, so its answers are the same
tokens. A tree's keys lie elsewhere until it is verified, and are summed in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_engine import Built, ask, build, expect_near
from gpu_models import NUMBERS, save_model, save_network

from srt.protocols.grammar import Opened
from srt.runner.tp_worker import TpModelWorker
from srt.spec.worker import SpeculativeWorker
from srt.verify.driver import Outcome
from srt.wire.messages import Work
from srt.wire.params import Grammar

VOCAB = int(NUMBERS["vocab_size"])
FEW = {7: 50.0, 8: 50.0, 9: 50.0}  # hardly anything else comes, so there is something to guess
STEPS = ("--speculative-num-steps", "3")
DUMMY = ("--speculative-draft-load-format", "dummy")


class Thirds:
    """A grammar: the token at place p of an answer leaves p % 3 when it is divided by 3."""

    def __init__(self) -> None:
        self._masks = [
            bytes(
                sum(1 << bit for bit in range(8) if (8 * byte + bit) % 3 == rest)
                for byte in range(-(-VOCAB // 8))
            )
            for rest in range(3)
        ]
        self._places: dict[int, int] = {}
        self._fresh: list[int] = []

    def open(self, uid: int, grammar: Grammar) -> None:
        self._places[uid] = 0
        self._fresh.append(uid)

    def ready(self, seconds: float) -> list[Opened]:
        fresh, self._fresh = self._fresh, []
        return [Opened(uid=uid, mask=self._masks[0]) for uid in fresh]

    def follow(self, uid: int, tokens: list[int]) -> bytes | None:
        self._places[uid] += len(tokens)
        return self.peek(uid, [])

    def peek(self, uid: int, tokens: list[int]) -> bytes | None:
        return self._masks[(self._places[uid] + len(tokens)) % 3]

    def forget(self, uid: int) -> None:
        self._places.pop(uid, None)


def greedy() -> list[Work]:
    """With the log-probabilities of what the best is chosen from: where two are as good as each other,
    these are alike."""
    penalties = {"presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    rules = [
        {},
        {"logit_bias": FEW},
        {"logit_bias": dict.fromkeys(range(0, 900, 2), -100.0), "min_tokens": 8},
        penalties,
        {"grammar": Grammar(kind="json_object")},
        {"grammar": Grammar(kind="json_object"), "logit_bias": FEW, **penalties},
    ]
    return [
        ask(n, 20 + 9 * n, **{"logprobs_mode": "processed", **each}) for n, each in enumerate(rules)
    ]


def drawn() -> list[Work]:
    """With a seed of their own; the log-probabilities come along, raw or of what was drawn from."""
    rules = [
        {"top_p": 0.9, "logprobs_mode": "processed"},
        {"top_k": 40, "min_p": 0.02, "logit_bias": FEW},
        {"temperature": 0.7, "presence_penalty": 0.8, "logprobs_mode": "processed"},
        {"grammar": Grammar(kind="json_object"), "top_p": 0.8, "repetition_penalty": 1.2},
        {"logprobs": None, "logit_bias": FEW},
        {"prompt_logprobs": 1},
    ]
    return [ask(50 + n, 25 + 7 * n, **{"temperature": 1.0, **each}) for n, each in enumerate(rules)]


def expect_rules(works: list[Work], found: dict[int, Outcome]) -> None:
    for work in works:
        tokens, params = found[work.uid].tokens, work.params
        assert found[work.uid].end.failure is None and len(tokens) == params.max_tokens
        banned = {token for token, bias in params.logit_bias.items() if bias <= -100.0}
        assert banned.isdisjoint(tokens)
        if params.grammar is not None:
            assert [token % 3 for token in tokens] == [place % 3 for place in range(len(tokens))]
        assert len(found[work.uid].logprobs) == (0 if params.logprobs is None else len(tokens))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def network(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_network(tmp_path_factory.mktemp("network"), target)


@pytest.fixture(scope="module")
def alone(target: Path, cache: str) -> Iterator[dict[int, Outcome]]:
    """Without guesses."""
    with build(target, cache, "--deterministic") as built:
        yield built.run(greedy(), drawn(), grammars=Thirds())


def run(built: Built, works: list[Work]) -> dict[int, Outcome]:
    """In two waves, so that prompts come while others guess."""
    assert isinstance(built.worker, SpeculativeWorker)
    assert isinstance(built.worker.target, TpModelWorker)
    half = len(works) // 2
    found = built.run(works[:half], works[half:], grammars=Thirds(), draft_eager=True)
    expect_rules(works, found)
    assert sum(outcome.end.usage.drafted_tokens for outcome in found.values()) > 20
    return found


@pytest.mark.parametrize("kind", ["ngram", "standalone", "eagle3"])
def test_chains(
    kind: str, target: Path, network: Path, cache: str, alone: dict[int, Outcome]
) -> None:
    """A model that is its own draft is right always; a network of noise hardly ever."""
    flags = {
        "ngram": (),
        "standalone": (
            "--speculative-draft-model",
            str(target),
            "--speculative-num-draft-tokens",
            "3",
        ),
        "eagle3": (
            *("--speculative-draft-model", str(network), *DUMMY, *STEPS),
            *("--speculative-lookup", "--speculative-confidence", "0"),
        ),
    }[kind]
    works = greedy() + drawn()
    with build(target, cache, "--deterministic", "--speculative-algorithm", kind, *flags) as built:
        found = run(built, works)
    for work in works:
        assert found[work.uid].tokens == alone[work.uid].tokens, work.uid
    accepted = sum(outcome.end.usage.accepted_tokens for outcome in found.values())
    assert accepted > (100 if kind == "standalone" else 10)


def test_trees(target: Path, network: Path, cache: str, alone: dict[int, Outcome]) -> None:
    flags = [
        *("--speculative-algorithm", "eagle3", "--speculative-draft-model", str(network), *DUMMY),
        *(*STEPS, "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "12"),
    ]
    with build(target, cache, *flags) as built:
        found = run(built, [*greedy(), *drawn()])
    compared = [work.uid for work in greedy()]
    expect_near(
        {uid: found[uid] for uid in compared}, {uid: alone[uid] for uid in compared}, 0.15, 24
    )
