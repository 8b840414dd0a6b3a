"""The engine as `tandem serve` builds it, in this process, and requests for it."""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from srt.config.context import publish
from srt.config.flags import add_flags, read_namespace
from srt.launch.parts import build_worker, scheduler_settings
from srt.launch.prepare import prepare
from srt.protocols.grammar import Grammars
from srt.protocols.worker import Idler, Worker
from srt.scheduler.budget import Settings
from srt.verify.driver import Driver, Outcome, Outcomes
from srt.wire.messages import Work
from srt.wire.params import SamplingParams, TextOptions, TokenLogprobs

DEVICE = "cuda"
MAX_RUNNING = 8
FLAGS = ("--max-total-tokens", "8192", "--max-running", str(MAX_RUNNING), "--log-level", "warning")
GRAPHS = ("--cuda-graph-sizes", "1", "2", "4", "8")
EAGER = ("--cuda-graph-sizes", "0")


class OnStream(Driver):
    """A worker launches on the stream that was current when it was built. A process that serves has one
    worker; a test has several, and each run goes back to its own one's stream."""

    def __init__(
        self,
        worker: Worker,
        settings: Settings,
        stream: torch.cuda.Stream | None,
        grammars: Grammars | None,
    ) -> None:
        super().__init__(worker, settings, grammars=grammars)
        self._stream = stream

    def run(self, *waves: Sequence[Work]) -> Outcomes:
        with torch.cuda.stream(self._stream):
            return super().run(*waves)


@dataclass(frozen=True, slots=True)
class Built:
    """One set of weights, and as many schedulers over it as a test asks for."""

    worker: Worker
    settings: Settings  # without a prefix cache, without overlap
    stream: torch.cuda.Stream | None

    def run(
        self, *waves: Sequence[Work], grammars: Grammars | None = None, **changes: object
    ) -> dict[int, Outcome]:
        """Answers by uid, from an engine whose cache is empty. `changes`: fields of its settings."""
        return self.driver(grammars, **changes).run(*waves)

    def driver(self, grammars: Grammars | None = None, **changes: object) -> Driver:
        settings = replace(self.settings, **changes)  # type: ignore[arg-type]
        return OnStream(self.worker, settings, self.stream, grammars)


@contextmanager
def build(model: Path, cache: str, *flags: str, device: str = DEVICE) -> Iterator[Built]:
    """Later `flags` win over earlier ones. What it held of the device's memory is given back."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    graphs = GRAPHS if device == "cuda" else ()
    words = ["--model", str(model), "--device", device, *FLAGS, *graphs, *flags]
    args, sources = read_namespace(parser.parse_args(words))
    boot, _ = prepare(args, sources, folder="none", cache_folder=cache)
    publish(boot.args, boot.facts, role="test", entropy=boot.entropy, sources=boot.sources)
    is_gpu = device == "cuda"
    with torch.cuda.stream(torch.cuda.default_stream() if is_gpu else None):
        worker = build_worker(boot, lambda phase, fraction: None)
        while isinstance(worker, Idler) and worker.idle():
            pass
        stream = torch.cuda.current_stream() if is_gpu else None
    settings = replace(scheduler_settings(), radix_cache=False, depth=0)
    try:
        yield Built(worker, settings, stream)
    finally:
        worker.close()
        del worker
        gc.collect()
        if is_gpu:
            torch.cuda.empty_cache()


def ask(uid: int, length: int, answer: int = 24, **params: object) -> Work:
    """A prompt of random ids, the same for the same uid; greedy unless `params` say otherwise. The
    logprob of each token of its answer comes along."""
    draw = random.Random(uid)
    return Work(
        uid=uid,
        rid=str(uid),
        token_ids=[draw.randrange(900) for _ in range(length)],
        params=SamplingParams(
            **{  # type: ignore[arg-type]
                "max_tokens": answer,
                "temperature": 0.0,
                "ignore_eos": True,
                "seed": uid,
                "logprobs": 2,
                **params,
            }
        ),
        text=TextOptions(detokenize=False),
    )


def batch(first: int = 0, **params: object) -> list[Work]:
    """As many as the largest graph takes, of unlike lengths; half of them are drawn, half greedy."""
    return [
        ask(first + n, 20 + 9 * n, **{"temperature": float(n % 2), **params})
        for n in range(MAX_RUNNING)
    ]


def score(work: Work, tokens: Sequence[int], uid: int) -> Work:
    """The prompt and an answer to it, to be given logprobs and nothing else."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, seed=0)
    return replace_struct(work, uid, [*work.token_ids, *tokens], params)


def replace_struct(work: Work, uid: int, token_ids: list[int], params: SamplingParams) -> Work:
    return Work(uid=uid, rid=str(uid), token_ids=token_ids, params=params, text=work.text)


def expect_same(
    found: dict[int, Outcome], wanted: dict[int, Outcome], rounding: float = 0.0
) -> None:
    """Tokens to the bit, and the logprobs of their alternatives within `rounding`."""
    assert found.keys() == wanted.keys()
    for uid, outcome in found.items():
        other = wanted[uid]
        assert outcome.end.failure is None and other.end.failure is None
        assert outcome.tokens == other.tokens, uid
        for one, two in zip(outcome.logprobs, other.logprobs, strict=True):
            for a, b in zip([one.chosen, *one.top], [two.chosen, *two.top], strict=True):
                assert a.token == b.token and abs(a.logprob - b.logprob) <= rounding, uid


def expect_near(
    found: dict[int, Outcome], wanted: dict[int, Outcome], tolerance: float, least: int
) -> None:
    """Greedy answers whose sums were rounded in another order: they may part where two tokens are as
    good as each other, and agree up to there. `least` tokens of all have to agree."""
    agreed = 0
    for uid, outcome in found.items():
        other = wanted[uid]
        assert outcome.end.failure is None and other.end.failure is None
        assert len(outcome.tokens) == len(other.tokens)
        for one, two in zip(outcome.logprobs, other.logprobs, strict=True):
            gap = abs(one.chosen.logprob - two.chosen.logprob)
            assert gap <= tolerance, f"request {uid}: {one.chosen} and {two.chosen}"
            if one.chosen.token != two.chosen.token:
                break
            agreed += 1
    assert agreed >= least, f"only {agreed} tokens agree"


def chosen(each: TokenLogprobs | None) -> float:
    assert each is not None
    return each.chosen.logprob
