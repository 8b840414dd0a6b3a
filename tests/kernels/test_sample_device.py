"""The sampler of a device with its Triton kernels: rules, grammars and penalties together."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import torch

from srt.protocols.forward_batch import RowSetup
from srt.sampling.device_sampler import DeviceSampler
from srt.sampling.sampler import Sampler
from srt.wire.params import SamplingParams
from tests.triton_loops import mend_loop_bounds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 300
PARAMS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(seed=1, frequency_penalty=0.6, top_p=0.9, logprobs=2),
    SamplingParams(seed=2, top_k=5, logprobs=3, logprobs_mode="processed"),
    SamplingParams(seed=3, min_p=0.1, min_tokens=2, logit_bias={4: -100.0, 5: 3.0}),
    SamplingParams(seed=4, temperature=0.5),
]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if DEVICE == "cpu":
        mend_loop_bounds(monkeypatch)


def opened(sampler: Sampler | DeviceSampler, params: list[SamplingParams]) -> None:
    sampler.open(
        [
            RowSetup(row=row, params=each, tokens=[5, 6, 5, 9], prompt_len=3, stop_ids=[2, 3])
            for row, each in enumerate(params)
        ]
    )


@pytest.mark.parametrize("masked", [False, True])
def test_tokens_are_those_of_the_sampler_that_waits(masked: bool) -> None:
    rng, noise = random.Random(1), torch.Generator().manual_seed(2)
    size = len(PARAMS)
    waiting, launching = Sampler(size, VOCAB), DeviceSampler(size, VOCAB, DEVICE, "triton")
    opened(waiting, PARAMS)
    opened(launching, PARAMS)
    for _ in range(5):
        rows = rng.sample(range(size), rng.randrange(2, size + 1))
        masks = [None if rng.random() < 0.5 else rng.randbytes(-(-VOCAB // 8)) for _ in rows]
        logits = torch.randn(len(rows), VOCAB, generator=noise) * 2
        expected = waiting.sample(logits.clone(), rows, masks if masked else None)
        there = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        launched = launching.launch(logits.to(DEVICE), rows, there, masks if masked else None)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found = launched.finish()
        assert found.tokens == expected.tokens.tolist()
        assert found.errors == expected.errors
        for a, b in zip(found.logprobs, expected.logprobs, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4)
                finite = [each.token for each in b.top if each.logprob > float("-inf")]
                assert [each.token for each in a.top[: len(finite)]] == finite
