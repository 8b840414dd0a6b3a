"""Compiled kernels and attention backends behind the whole engine, in bfloat16.

Their roundings differ, so their own choices may part; in the first test every engine is dictated the
same tokens and the logits of every position are compared with those of float32. A wrong page, position
or mask changes logits by as much as they are large; bfloat16's rounding by a few hundredths of that.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from request_set import VOCAB, again, all_requests
from whole_engine import MAX_ROWS, Dictated, Outcome, Setting, engine, expect_equal

from kernels.native_build import Library, build
from srt.config.facts import ModelFacts
from srt.scheduler.balance import Balance

Logits = dict[tuple[int, int], torch.Tensor]

EXACT = Setting(max_running=1, max_step_tokens=512)
ROUNDED = Setting(dtype="bfloat16", radix=True, depth=1, chunk=16)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    if compiler is None or "avx512f" not in flags:
        pytest.skip("the native kernels need a C compiler and AVX-512")
    built = build(tmp_path_factory.mktemp("kernels"), compiler)
    assert isinstance(built, Library), built
    return built


def dictate(
    facts: ModelFacts, alone: dict[int, Outcome], setting: Setting, library: Library | None
) -> tuple[Logits, Logits]:
    """The logits before every token of every answer; cold, and again with a warm cache."""
    script = {1000 + uid: outcome.tokens for uid, outcome in alone.items()}
    sampler = Dictated(MAX_ROWS, VOCAB, script)
    requests = [work for work in all_requests() if work.params.max_tokens]
    with engine(facts, setting, library, sampler) as made:
        found = made.run(requests[:4], requests[4:])
        cold = dict(sampler.seen)
        sampler.seen.clear()
        made.run(again(requests, 100))
    for work in requests:
        assert found[work.uid].tokens == alone[work.uid].tokens
    return cold, sampler.seen


@pytest.fixture(scope="module")
def exact(facts: ModelFacts, alone: dict[int, Outcome]) -> Logits:
    return dictate(facts, alone, EXACT, None)[0]


def errors(found: Logits, exact: Logits) -> tuple[float, float]:
    """The logits' mean difference, of all positions and of the worst one, in mean sizes of a logit."""
    assert set(found) >= set(exact)  # the overlap loop asks for one more of those that stop
    names = sorted(exact)
    wanted = torch.stack([exact[name] for name in names])
    gaps = (torch.stack([found[name] for name in names]) - wanted).abs().mean(-1)
    size = wanted.abs().mean()
    return float(gaps.mean() / size), float(gaps.max() / size)


@pytest.mark.parametrize(
    ("implementation", "prefill", "decode"),
    [
        ("reference", "sdpa", "sdpa"),
        ("torch", "sdpa", "sdpa"),
        ("native", "sdpa", "sdpa"),
        ("native", "native", "native"),
        ("native", "native", "sdpa"),
        ("native", "sdpa", "native"),
    ],
)
@pytest.mark.parametrize("page_size", (1, 16))
def test_bfloat16_engines_stay_near_float32(
    implementation: str,
    prefill: str,
    decode: str,
    page_size: int,
    facts: ModelFacts,
    alone: dict[int, Outcome],
    exact: Logits,
    request: pytest.FixtureRequest,
) -> None:
    library = request.getfixturevalue("library") if implementation == "native" else None
    setting = replace(
        ROUNDED, implementation=implementation, prefill=prefill, decode=decode, page_size=page_size
    )
    for found in dictate(facts, alone, setting, library):
        mean, worst = errors(found, exact)
        assert mean < 0.022
        assert worst < 0.06


@pytest.mark.parametrize("page_size", (1, 16))
def test_native_answers_do_not_depend_on_company(
    page_size: int, facts: ModelFacts, library: Library
) -> None:
    """What the compiled kernels compute for a token depends on its own row alone, bit for bit, so these
    engines need no tolerance: batch, chunks, cache and overlap change nothing even in bfloat16."""
    native = Setting(implementation="native", prefill="native", decode="native", dtype="bfloat16")
    expected: dict[int, Outcome] = {}
    with engine(facts, replace(native, max_running=1, max_step_tokens=512), library) as lone:
        for work in all_requests():
            expected.update(lone.run([work]))
    setting = replace(native, page_size=page_size, radix=True, depth=1, chunk=3)
    with engine(facts, setting, library) as made:
        for shift in (0, 100):
            found = made.run(again(all_requests(), shift))
            expect_equal(found, expected, shift, tolerance=0.0)


@pytest.mark.parametrize("drafter", ("ngram", "self", "eagle", "eagle3", "multi_layer"))
def test_native_answers_do_not_depend_on_guesses(
    drafter: str, facts: ModelFacts, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verified token is computed in another batch, by another half of the kernels; the same bits."""
    monkeypatch.setattr(Balance, "pays", lambda *_: True)
    native = Setting(implementation="native", prefill="native", decode="native", dtype="bfloat16")
    expected: dict[int, Outcome] = {}
    with engine(facts, replace(native, max_running=1, max_step_tokens=512), library) as lone:
        for work in all_requests():
            expected.update(lone.run([work]))
    setting = replace(native, radix=True, chunk=16, drafter=drafter)
    with engine(facts, setting, library) as made:
        expect_equal(made.run(all_requests()), expected, tolerance=0.0)
        usages = [each.end.usage for each in made.outcomes.values()]
        assert sum(usage.accepted_tokens for usage in usages) > 10
