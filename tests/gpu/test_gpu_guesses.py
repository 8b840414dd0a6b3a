"""Chains of guesses that never leave the GPU: where no sum depends on the batch, the answers are those
without guesses, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_engine import MAX_RUNNING, Built, ask, build
from gpu_models import save_network

from srt.spec.device_worker import ChainWorker
from srt.wire.messages import Work

STEPS = 3


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_network(tmp_path_factory.mktemp("draft"), model)


@pytest.fixture(scope="module")
def guessing(model: Path, draft: Path, cache: str) -> Iterator[Built]:
    flags = [
        *("--speculative-algorithm", "eagle3", "--speculative-draft-model", str(draft)),
        *("--speculative-draft-load-format", "dummy", "--speculative-num-steps", str(STEPS)),
    ]
    with build(model, cache, "--deterministic", *flags) as built:
        assert isinstance(built.worker, ChainWorker)
        yield built


def crowd() -> list[Work]:
    """Greedy and drawn, and one that asks for logprobs, which is no plain row."""
    works = [
        ask(n, 20 + 9 * n, answer=30, temperature=float(n % 2), logprobs=None)
        for n in range(MAX_RUNNING)
    ]
    return [*works, ask(50, 33, answer=20)]


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_are_those_without_guesses(
    model: Path, cache: str, guessing: Built, depth: int
) -> None:
    works = crowd()
    found = guessing.run(works[:5], works[5:], depth=depth, draft_eager=True)
    with build(model, cache, "--deterministic") as plain:
        wanted = plain.run(works[:5], works[5:], depth=depth)
    for uid, outcome in found.items():
        assert outcome.end.failure is None and outcome.tokens == wanted[uid].tokens, uid
    assert sum(outcome.end.usage.drafted_tokens for outcome in found.values()) > 100
