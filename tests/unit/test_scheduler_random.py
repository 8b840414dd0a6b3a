"""Random traces: arrivals, aborts, deadlines, drains, in random settings. After every turn the audit is
clean and every waiting request knows why; in the end every uid has exactly one terminal item."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from scheduler_fakes import Box, HashWorker, prompt, work

from srt.scheduler.budget import Settings
from srt.scheduler.build import build_scheduler
from srt.scheduler.replay import replay
from srt.wire.codec import encode
from srt.wire.messages import AbortWork, Command, Drain, Message

NUM_TRACES = 2000
BATCH = 100


def settings_of(random: Random) -> dict[str, Any]:
    chunk = random.choice((0, 1, 5, 16))
    return {
        "max_itl": random.choice((None, 0.001, 0.01)) if chunk else None,
        "max_running": random.choice((1, 2, 5, 8)),
        "max_step_tokens": random.choice((4, 12, 40)),
        "chunked_prefill_size": chunk,
        "max_queued": random.choice((2, 100)),
        "max_queued_tokens": random.choice((None, 40)),
        "policy": random.choice(("fcfs", "longest-prefix", "priority")),
        "depth": random.choice((0, 1)),
        "radix_cache": random.random() < 0.7,
        "eviction_policy": random.choice(("lru", "lfu")),
        "draft_tokens": random.choice((0, 0, 1, 5)),
    }


def worker_of(random: Random) -> HashWorker:
    page = random.choice((1, 4, 16))
    slots = random.choice((48, 96, 400))
    errors = {(random.randrange(60), random.randrange(8)): "not a number"}
    return HashWorker(
        num_pages=slots // page + 1, page_size=page, max_rows=random.choice((2, 8)),
        context=random.choice((64, 512)), errors=errors if random.random() < 0.2 else None,
        token_seconds=random.choice((0.0, 0.0005)),
    )  # fmt: skip


def messages_of(random: Random, uids: list[int]) -> list[Any]:
    """What one turn brings. Prompts repeat and share beginnings."""
    made: list[Any] = []
    for _ in range(random.choice((0, 0, 1, 1, 3))):
        uid = len(uids) + 1
        uids.append(uid)
        text = prompt(random.randrange(3), random.choice((1, 4, 9, 16, 30, 70)))
        text = text + prompt(uid, random.choice((0, 0, 2)))
        made.append(
            work(
                uid,
                text,
                random.choice((None, 0, 1, 4, 20, 40)),
                leader=random.choice((None, None, max(uid - 1, 1))),
                priority=random.randrange(3),
                tenant=random.choice(("", "a", "b")),
                deadline=random.choice((None, None, 0.05, 0.5)),
                ignore_eos=random.random() < 0.3,
                min_tokens=random.choice((0, 3)),
                prompt_logprobs=random.choice((None, None, None, 1)),
                seed=uid % 3,
            )  # fmt: skip
        )
    if uids and random.random() < 0.15:
        made.append(AbortWork(uid=random.choice(uids), quiet=random.random() < 0.3))
    if random.random() < 0.02:
        made.append(Command(ticket=-len(uids), topic="requests"))
    return made


def run_trace(seed: int) -> Box:
    random = Random(seed)
    box = Box(worker_of(random), **settings_of(random))
    uids: list[int] = []
    quiet: set[int] = set()
    asked: set[int] = set()
    for _ in range(random.randrange(5, 30)):
        batch = [m for m in messages_of(random, uids) if getattr(m, "ticket", None) not in asked]
        asked.update(m.ticket for m in batch if isinstance(m, Command))
        quiet.update(m.uid for m in batch if isinstance(m, AbortWork) and m.quiet)
        box.turn(*batch)
    if random.random() < 0.2:
        box.turn(Drain(seconds=random.choice((0.0, 0.1))))
    box.run()
    for uid in uids:
        ends = [item.finish for item in box.items.get(uid, []) if item.finish is not None]
        assert len(ends) == 1 or (uid in quiet and not ends), (seed, uid)
        if ends:
            usage = ends[0].usage
            assert 0 <= usage.cached_tokens <= usage.prompt_tokens
            assert usage.completion_tokens == len(box.tokens(uid))
            assert sum(item.opened is not None for item in box.items[uid]) <= 1
    store = box.scheduler._store
    assert store.pages.num_free + store.cache.num_pages == store.pages.total
    assert store.cache.num_evictable == store.cache.num_pages
    assert store.rows.num_free == store.rows.total
    return box


@pytest.mark.parametrize("first", range(0, NUM_TRACES, BATCH))
def test_random_traces_leave_nothing_behind(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_trace(seed)


class Log:
    """An outbox that keeps the bytes."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send(self, message: Message) -> None:
        self.frames.append(encode(message))

    def close(self) -> None:
        pass


def record(path: Path, seed: int) -> tuple[list[bytes], int]:
    """Runs a random trace under a recorder; what was sent, and the number of steps."""
    random = Random(seed)
    worker = worker_of(random)
    settings = Settings(**settings_of(random))
    now = [0.0]

    def clock() -> float:
        now[0] += random.random() / 500
        return now[0]

    log = Log()
    scheduler = build_scheduler(worker, settings, log, clock, journal=path)
    uids: list[int] = []
    more, turns = True, 30
    while more or turns > 0:
        batch = messages_of(random, uids) if turns > 0 else []
        batch = [m for m in batch if getattr(m, "topic", "") != "requests"]
        more = scheduler.turn(batch)
        turns -= 1
    scheduler.close()
    return log.frames, len(worker.batches)


def test_recorded_runs_replay_step_for_step(tmp_path: Path) -> None:
    for seed in range(60):
        frames, steps = record(tmp_path / "journal", seed)
        log = Log()
        result = replay(tmp_path / "journal", log.send)
        assert result.difference is None, seed
        assert result.num_steps == steps
        assert log.frames == frames


def test_a_changed_journal_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    seed = next(s for s in range(100) if record(path, s)[1] > 20)
    record(path, seed)
    data = bytearray(path.read_bytes())
    place = data.index(b"digest") + 12
    data[place] ^= 1
    path.write_bytes(bytes(data))
    difference = replay(path).difference
    assert difference is not None and "another one" in difference


def test_a_journal_cut_short_replays_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    record(path, 3)
    path.write_bytes(path.read_bytes()[:-3])
    result = replay(path)
    assert result.difference is not None and "cut off" in result.difference
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a journal"):
        replay(path)
