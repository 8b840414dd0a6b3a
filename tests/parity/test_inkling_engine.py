"""Inkling in the whole engine: what short convolutions remember is right behind cached prefixes, after
retractions, in chunks and beside others. Log-probabilities to 1e-4."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from request_set import again, all_requests, long_requests
from whole_engine import Outcome, Setting, engine, expect_equal, num_cached, num_retractions

from srt.config.context import get_context
from srt.config.facts import ModelFacts
from srt.wire.messages import Work
from tests.inkling_models import save

CHOSEN = range(1, 20)


@pytest.fixture(scope="module", autouse=True)
def published() -> Iterator[None]:
    with get_context().override_server_args(load_format="safetensors"):
        yield


@pytest.fixture(scope="module")
def inkling(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return save(tmp_path_factory.mktemp("tiny-inkling"))[1]


def requests() -> list[Work]:
    return [each for each in all_requests() if each.uid in CHOSEN]


@pytest.fixture(scope="module")
def lone(inkling: ModelFacts) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    with engine(inkling, Setting(max_running=1, max_step_tokens=512)) as made:
        for work in requests():
            found.update(made.run([work]))
    return found


@pytest.mark.parametrize(("chunk", "page_size", "depth"), [(3, 16, 0), (16, 1, 1), (64, 16, 1)])
def test_together_equals_alone(
    chunk: int, page_size: int, depth: int, inkling: ModelFacts, lone: dict[int, Outcome]
) -> None:
    setting = Setting(chunk=chunk, page_size=page_size, radix=True, depth=depth)
    with engine(inkling, setting) as made:
        cold = made.run(requests()[:3], requests()[3:9], requests()[9:])
        expect_equal(cold, lone)
        warm = made.run(again(requests(), 100))
        expect_equal(warm, lone, shift=100)
        assert num_cached(warm) > num_cached(cold) > 0


def test_retraction_resumes_exactly(inkling: ModelFacts, lone: dict[int, Outcome]) -> None:
    setting = Setting(chunk=16, radix=True, depth=1, kv_tokens=256)
    with engine(inkling, setting) as made:
        found = made.run([each for each in long_requests() if each.uid in CHOSEN])
        expect_equal(found, lone)
        assert num_retractions(found) > 0
