"""The scheduler and its worker in this process, built as `tandem serve` builds them: requests in, times
of tokens out. Nothing is tokenized, encoded or sent."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from bench.gpu.other_ranks import OtherRanks
from bench.gpu.sets import Ask
from srt.config.context import publish
from srt.config.flags import add_flags, read_namespace
from srt.launch.folder import SocketFolder
from srt.launch.parts import build_scheduler_part, scheduler_settings
from srt.launch.prepare import prepare
from srt.protocols.worker import Idler, Worker, WorkerFacts
from srt.scheduler.build import build_scheduler
from srt.scheduler.loop import Scheduler
from srt.wire.messages import AbortWork, Command, Message, Reply, Tokens, Work, WorkMessage
from srt.wire.params import Finish, SamplingParams, TextOptions

W = TypeVar("W", bound=Worker)
GRACE_TURNS = 10_000  # for aborted requests to be gone


class Overdue(Exception):
    """A part took longer than it may."""


class Arrivals:
    """The outbox: keeps what came and when. A message costs it what appending to a list costs."""

    def __init__(self) -> None:
        self.log: list[tuple[float, Message]] = []

    def send(self, message: Message) -> None:
        self.log.append((time.perf_counter(), message))

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class Answer:
    """What one request got: `times` has one entry for each token, seconds on the machine's clock."""

    begin: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All answers of one run, in the order of their requests. Seconds on the machine's clock."""

    begin: float
    end: float
    answers: list[Answer]

    @property
    def wall(self) -> float:
        return self.end - self.begin

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def full_batch_rate(self) -> float:
        """Tokens a second while every request decodes: from the moment the last one has its first token
        to the moment the first one ends."""
        since = max(answer.times[0] for answer in self.answers)
        until = min(answer.times[-1] for answer in self.answers)
        count = sum(since < when <= until for answer in self.answers for when in answer.times)
        return count / (until - since) if until > since else 0.0


class Engine:
    """One set of weights, and as many schedulers over it as are asked for, one after the other. A
    process holds one engine."""

    def __init__(self, flags: Sequence[str], cache_folder: str) -> None:
        """`flags` are those of `tandem serve`. Raises ConfigError."""
        parser = argparse.ArgumentParser()
        add_flags(parser)
        args, sources = read_namespace(parser.parse_args(list(flags)))
        began = time.perf_counter()
        self._folder = SocketFolder()
        boot, self.resolution = prepare(
            args, sources, folder=self._folder.path, cache_folder=cache_folder
        )
        publish(boot.args, boot.facts, role="bench", entropy=boot.entropy, sources=boot.sources)
        self._outbox = Arrivals()
        self._ranks = OtherRanks(boot)
        self._part = build_scheduler_part(
            boot,
            self._outbox,
            lambda phase, fraction: None,
            self._ranks.group,
            self._ranks.senders,
        )
        self.build_seconds = time.perf_counter() - began
        self._uids = 0

    @property
    def facts(self) -> WorkerFacts:
        return self._part.worker.facts

    def watch(self, wrap: Callable[[Worker], W]) -> W:
        """Puts something around the worker, for the schedulers made from now on. Returns it."""
        wrapped = wrap(self._part.worker)
        self._part.worker = wrapped
        return wrapped

    def describe(self) -> dict[str, Any]:
        return self._part.describe()

    def do_chores(self, limit: float) -> int:
        """What the worker keeps for quiet moments, such as capturing graphs. Returns how many there
        were."""
        worker, count, until = self._part.worker, 0, time.perf_counter() + limit
        while isinstance(worker, Idler) and worker.idle():
            count += 1
            if time.perf_counter() > until:
                raise Overdue(f"the worker's chores take longer than {limit:.0f} s")
        return count

    def scheduler(self, **changes: object) -> Scheduler:
        """A new one with an empty cache. `changes`: fields of its Settings."""
        settings = replace(scheduler_settings(), **changes)  # type: ignore[arg-type]
        return build_scheduler(self._part.worker, settings, self._outbox, time.monotonic)

    def run(self, scheduler: Scheduler, asks: Sequence[Ask], limit: float) -> Outcome:
        """Answers all of them, each from its own time on. Raises Overdue after `limit` seconds, with the
        scheduler empty again; RuntimeError for an answer that is not whole."""
        self._outbox.log.clear()
        works = [self._work(ask) for ask in asks]
        begin = time.perf_counter()
        begins = {work.uid: begin + ask.at for work, ask in zip(works, asks, strict=True)}
        waiting = sorted(
            ((ask.at, work) for ask, work in zip(asks, works, strict=True)),
            key=lambda pair: pair[0],
            reverse=True,
        )
        is_busy, late = True, begin + limit
        while is_busy or waiting:
            now = time.perf_counter()
            due: list[WorkMessage] = []
            while waiting and waiting[-1][0] <= now - begin:
                due.append(waiting.pop()[1])
            if due or is_busy:
                is_busy = scheduler.turn(due)
            elif waiting:
                time.sleep(min(0.001, max(0.0, waiting[-1][0] + begin - now)))
            if now > late:
                self._give_up(scheduler, [work.uid for work in works])
                raise Overdue(f"not done after {limit:.0f} s")
        end = time.perf_counter()
        answers = self._answers(begins)
        for answer, ask in zip(answers, asks, strict=True):
            if len(answer.tokens) != ask.max_tokens:
                raise RuntimeError(
                    f"{len(answer.tokens)} tokens instead of {ask.max_tokens}: {answer.finish}"
                )
        return Outcome(begin=begin, end=end, answers=answers)

    def profile(self, scheduler: Scheduler) -> dict[str, Any]:
        """The scheduler's own account of its steps, see `srt.scheduler.profile`."""
        self._outbox.log.clear()
        scheduler.turn([Command(ticket=1, topic="profile")])
        return next(m.body for _, m in self._outbox.log if isinstance(m, Reply))

    def close(self) -> None:
        self._part.close()
        self._ranks.close()
        self._folder.close()

    def _work(self, ask: Ask) -> Work:
        self._uids += 1
        return Work(
            uid=self._uids,
            rid=str(self._uids),
            token_ids=ask.token_ids,
            params=SamplingParams(
                max_tokens=ask.max_tokens,
                temperature=ask.temperature,
                ignore_eos=True,
                seed=self._uids if ask.seed is None else ask.seed,
            ),
            text=TextOptions(detokenize=False),
        )

    def _answers(self, begins: dict[int, float]) -> list[Answer]:
        answers = {uid: Answer(begin) for uid, begin in begins.items()}
        for when, message in self._outbox.log:
            if isinstance(message, Tokens):
                for item in message.all_items():
                    answer = answers[item.uid]
                    answer.tokens += item.tokens
                    answer.times += [when] * len(item.tokens)
                    answer.finish = item.finish
        return list(answers.values())

    def _give_up(self, scheduler: Scheduler, uids: list[int]) -> None:
        is_busy = scheduler.turn([AbortWork(uid=uid) for uid in uids])
        for _ in range(GRACE_TURNS):
            if not is_busy:
                return
            is_busy = scheduler.turn([])
