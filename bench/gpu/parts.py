"""What is measured on one engine in this process. Every part warms up with other prompts than it times,
and gives plain figures: seconds are `_s`, milliseconds `_ms`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.gpu.device_time import DeviceTimes, device_times
from bench.gpu.engine import Engine, Outcome
from bench.gpu.figures import Figures, compare, gap_figures, step_sums
from bench.gpu.sets import Ask, Prompts, Sizes, at_poisson_times, offline_set, online_mix
from bench.report import percentile
from srt.scheduler.loop import Scheduler

CHECKED = 8  # requests of the check, a size that is a graph's own
CHECKED_ANSWER = 32
CHORES_SECONDS = 120.0
PROMISED = 2.6  # median gaps between two tokens, of which no more than three may pass
WARM_UPS = 2
REPEATS = 5


class Bench:
    """The parts share one scheduler, whose prefix cache is off."""

    def __init__(self, engine: Engine, sizes: Sizes, limit: float) -> None:
        """`limit`: seconds that one run of a part may take."""
        self.engine, self.sizes, self.limit = engine, sizes, limit
        self._scheduler: Scheduler | None = None
        self._seed = 100

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            self._scheduler = self.engine.scheduler()
        return self._scheduler

    def reset(self) -> None:
        """After a step that failed, nobody knows what the scheduler thinks."""
        self._scheduler = None

    def _prompts(self) -> Prompts:
        """Other ones at every call."""
        self._seed += 1
        return Prompts(self.engine.facts.vocab_size, self._seed)

    def _run(self, asks: Sequence[Ask]) -> Outcome:
        return self.engine.run(self.scheduler, asks, self.limit)

    def build(self) -> Figures:
        """How long it took, what it holds, and what it was made with."""
        return {
            "build_s": self.engine.build_seconds,
            **self.engine.describe(),
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        }

    def check(self) -> Figures:
        """Answers with the overlap loop and without it, and again; all of them in one batch, so that
        each step computes the same. Every other one is greedy, the rest is drawn with a seed: a model
        of noise likes to repeat itself. `tokens` are for comparing with other engines."""
        prompts = Prompts(self.engine.facts.vocab_size, 7)
        asks = [
            Ask(
                token_ids=prompts.ids(self.sizes.prompt // 2 + number),
                max_tokens=CHECKED_ANSWER,
                temperature=number % 2,
                seed=number,
            )
            for number in range(min(CHECKED, self.sizes.max_running))
        ]
        found = []
        for depth in (1, 0, 1):
            scheduler = self.engine.scheduler(depth=depth)
            outcome = self.engine.run(scheduler, asks, self.limit)
            found.append([answer.tokens for answer in outcome.answers])
            faults = scheduler.audit()
            if faults:
                raise RuntimeError(f"audit: {'; '.join(faults)}")
        overlap, plain, again = found
        return {
            "overlap == plain": compare(overlap, plain),
            "again == before": compare(again, overlap),
            "distinct": len({token for answer in overlap for token in answer}),
            "tokens": overlap,
        }

    def warm(self) -> Figures:
        """Chores first, then answers of every length, so that every batch size has been seen."""
        chores = self.engine.do_chores(CHORES_SECONDS)
        prompts, count = self._prompts(), self.sizes.max_running
        asks = [Ask(token_ids=prompts.ids(16), max_tokens=2 + n) for n in range(count)]
        outcome = self._run(asks)
        self._run([Ask(token_ids=prompts.ids(16), max_tokens=4, temperature=0.6)] * 2)
        return {"chores": chores, "every_batch_size_s": outcome.wall}

    def alone(self) -> Figures:
        """Batch 1: milliseconds per token, from the first token to the last; median of three answers."""
        per_token = []
        for number in range(4):
            [ask] = self._prompts().batch(1, self.sizes.prompt, self.sizes.alone)
            gaps = self._run([ask]).answers[0].gaps
            if number:
                per_token.append(statistics.mean(gaps) * 1e3)
        return {"ms_per_token": statistics.median(per_token), "all": per_token}

    def first_token(self) -> Figures:
        """From a request's hand-over to its first token in hand, nothing else running; median."""
        found: Figures = {}
        for length in self.sizes.first_token:
            times = []
            for number in range(WARM_UPS + REPEATS):
                [ask] = self._prompts().batch(1, length, 1)
                [answer] = self._run([ask]).answers
                if number >= WARM_UPS:
                    times.append((answer.times[0] - answer.begin) * 1e3)
            found[f"{length}_ms"] = statistics.median(times)
            found[f"{length}_all"] = times
        return found

    def prefix(self) -> Figures:
        """The first token of a prompt most of which is in the prefix cache, and of the same prompt where
        nothing is; medians."""
        found: Figures = {}
        scheduler = self.engine.scheduler(radix_cache=True)
        for length, new in self.sizes.prefixes:
            prompts = self._prompts()
            prefix = prompts.ids(length)

            def wait_for(known: list[int], draw: Prompts = prompts, new: int = new) -> float:
                ask = Ask(token_ids=known + draw.ids(new), max_tokens=1)
                [answer] = self.engine.run(scheduler, [ask], self.limit).answers
                return (answer.times[0] - answer.begin) * 1e3

            fresh = [wait_for(prompts.ids(length)) for _ in range(1 + WARM_UPS)]
            wait_for(prefix)
            cached = [wait_for(prefix) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:]
            found[f"{length}+{new}_ms"] = statistics.median(cached)
            found[f"{length}+{new}_all"] = cached
            found[f"{length}+{new}_computed"] = statistics.median(fresh[1:])
        return found

    def decode(self) -> Figures:
        """Tokens a second while all of a batch decode, prefill apart; and over all, prefill included."""
        found: Figures = {}
        for size in self.sizes.batches:
            for answer in (8, self.sizes.batch_answer):
                asks = self._prompts().batch(size, self.sizes.prompt, answer)
                outcome = self._run(asks)
            found[str(size)] = outcome.full_batch_rate()
            found[f"{size}_with_prefill"] = outcome.num_tokens / outcome.wall
        return found

    def offline(self) -> Figures:
        """The offline set, twice: output tokens by wall time, and where the second run's time went."""
        asks = offline_set(self.sizes, self.engine.facts.vocab_size)
        self._run(online_mix(self.sizes, self.engine.facts.vocab_size, len(asks) // 2, seed=21))
        runs = []
        for _ in range(2):
            scheduler = self.engine.scheduler()
            runs.append(self.engine.run(scheduler, asks, self.limit))
        return {
            "tok_s": [run.num_tokens / run.wall for run in runs],
            "wall_s": [run.wall for run in runs],
            "prompt_tokens": sum(len(ask.token_ids) for ask in asks),
            "output_tokens": runs[0].num_tokens,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            **step_sums(self.engine.profile(scheduler)["groups"]),
        }

    def online(self) -> Figures:
        """Poisson arrivals at 70 % of what the same mix gives when all of it is sent at once; then the
        same with `--max-itl-ms` at PROMISED times the median gap of the first, which is what the table
        shows."""
        sizes, vocab = self.sizes, self.engine.facts.vocab_size
        burst = online_mix(sizes, vocab, 2 * sizes.max_running, seed=11)
        saturated = self._run(burst)
        rate = 0.7 * len(burst) / saturated.wall
        count = max(8, round(rate * sizes.online_seconds))
        asks = at_poisson_times(online_mix(sizes, vocab, count, seed=12), rate, seed=13)
        free = _online_figures(self._run(asks))
        promise = PROMISED * free["itl_ms_p50"] / 1e3
        scheduler = self.engine.scheduler(max_itl=promise)
        kept = _online_figures(self.engine.run(scheduler, asks, self.limit))
        return {
            "rate": rate,
            "requests": count,
            "saturated_tok_s": saturated.num_tokens / saturated.wall,
            "max_itl_ms": promise * 1e3,
            **kept,
            "without_promise": free,
        }

    def profile(self) -> Figures:
        """Where a decode step's time goes: stages of the host, wall, and what the device computed."""
        found: Figures = {}
        for size in self.sizes.profile:
            scheduler = self.engine.scheduler()
            asks = self._prompts().batch(size, self.sizes.prompt, self.sizes.batch_answer)
            self.engine.run(scheduler, asks, self.limit)
            groups = self.engine.profile(scheduler)["groups"]
            group = groups.get(f"decode {size}")
            if group is None:
                raise RuntimeError(f"no step of {size} decodes, only {sorted(groups)}")
            stages = {name: seconds * 1e3 for name, seconds in group["stages"].items()}
            host = sum(ms for name, ms in stages.items() if name != "wait")
            device, steps = self._device_times(size)
            found[str(size)] = {
                "wall_ms": group["step_seconds"] * 1e3,
                "host_ms": host,
                "stages_ms": stages,
                "phases_ms": {name: s * 1e3 for name, s in group["phases"].items()},
                "device_ms_per_step": device.busy_ms / steps,
                "kernels": device.top(steps),
            }
        return found

    def _device_times(self, size: int) -> tuple[DeviceTimes, int]:
        """Of the steps that a longer answer has more than a shorter one, and how many these are."""
        longer, shorter = self.sizes.batch_answer, self.sizes.batch_answer // 2
        times = [
            device_times(partial(self._run, self._prompts().batch(size, self.sizes.prompt, answer)))
            for answer in (shorter, longer)
        ]
        return times[1].minus(times[0]), longer - shorter


PARTS: dict[str, Callable[[Bench], Figures]] = {
    "build": Bench.build,
    "check": Bench.check,
    "warm": Bench.warm,
    "batch1": Bench.alone,
    "ttft": Bench.first_token,
    "prefix": Bench.prefix,
    "decode": Bench.decode,
    "offline": Bench.offline,
    "online": Bench.online,
    "profile": Bench.profile,
}


def _online_figures(outcome: Outcome) -> Figures:
    firsts = [answer.times[0] - answer.begin for answer in outcome.answers]
    return {
        **gap_figures([gap for answer in outcome.answers for gap in answer.gaps]),
        "ttft_ms_p50": percentile(firsts, 0.5) * 1e3,
        "ttft_ms_p99": percentile(firsts, 0.99) * 1e3,
    }
