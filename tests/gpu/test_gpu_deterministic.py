"""--deterministic: a request's bits are the same whatever else runs, and however its prompt is cut.

Its tokens are compared, and the logprobs of their alternatives: other bits in a logit, which comes of
values in bfloat16, would move these by 0.001 and more. The sum under a logprob is torch's, which adds
in an order that depends on the number of rows, and may move them by a few millionths.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_engine import EAGER, MAX_RUNNING, Built, ask, batch, build, expect_same

from srt.verify.driver import Outcome

SUM = 1e-5


@pytest.fixture(scope="module")
def deterministic(model: Path, cache: str) -> Iterator[Built]:
    with build(model, cache, "--deterministic") as built:
        yield built


@pytest.fixture(scope="module")
def alone(deterministic: Built) -> dict[int, Outcome]:
    """Each request by itself, its prompt whole."""
    found: dict[int, Outcome] = {}
    for work in batch():
        found |= deterministic.run([work], chunked_prefill_size=4096, max_step_tokens=4096)
    return found


def test_in_company(deterministic: Built, alone: dict[int, Outcome]) -> None:
    expect_same(deterministic.run(batch()), alone, SUM)


@pytest.mark.parametrize("depth", [0, 1])
def test_while_others_come_and_go(
    deterministic: Built, alone: dict[int, Outcome], depth: int
) -> None:
    others = [ask(100 + n, 5 + 11 * n, answer=2 + n) for n in range(2 * MAX_RUNNING)]
    works = batch()
    found = deterministic.run(others[:5], works[:4], others[5:], works[4:], depth=depth)
    expect_same({work.uid: found[work.uid] for work in works}, alone, SUM)


@pytest.mark.parametrize("chunk", [16, 23])
def test_with_its_prompt_cut(deterministic: Built, alone: dict[int, Outcome], chunk: int) -> None:
    expect_same(deterministic.run(batch(), chunked_prefill_size=chunk, depth=1), alone, SUM)


def test_with_its_prompt_cached(deterministic: Built, alone: dict[int, Outcome]) -> None:
    """What a first run leaves in the cache is what the second would have computed."""
    driver = deterministic.driver(radix_cache=True, depth=1)
    driver.run([ask(200 + n, 20 + 9 * n, answer=1) for n in range(MAX_RUNNING)])
    first = [ask(300 + n, 1, answer=1) for n in range(MAX_RUNNING)]
    for work, its in zip(first, batch(), strict=True):
        work.token_ids = its.token_ids
    driver.run(first)
    found = driver.run(batch())
    assert sum(outcome.end.usage.cached_tokens for outcome in found.values()) > 100
    expect_same(found, alone, SUM)


def test_without_recorded_steps(model: Path, cache: str, alone: dict[int, Outcome]) -> None:
    with build(model, cache, "--deterministic", *EAGER) as eager:
        expect_same(eager.run(batch()), alone, SUM)
