"""The driver's arithmetic and order, with a target that answers from a table."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from bench.compare import compare
from bench.drive import WARM_TOKENS, drive, warm_up
from bench.record import Record
from bench.report import percentile, render, summarize
from bench.scenario import make_workload, read_scenario, workload_of
from bench.targets import Turns
from bench.workloads import (
    Item,
    multi_turn,
    random_prompts,
    replay_trace,
    shared_prefix,
    with_token_ids,
)
from srt.errors import ConfigError


class EchoTarget:
    """Answers at once and remembers what was open at the same time."""

    def __init__(self) -> None:
        self.open = 0
        self.most_open = 0
        self.asked: list[tuple[Item, Turns]] = []

    async def ask(self, item: Item, history: Turns, record: Record, start: float) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.asked.append((item, history))
        record.sent = time.perf_counter() - start
        await asyncio.sleep(0)
        record.arrivals = [(record.sent + 0.1, 1), (record.sent + 0.3, 2)]
        record.text = f"answer to {item.prompt[:10]}"
        record.prompt_tokens, record.completion_tokens, record.cached_tokens = 10, 3, 5
        record.end = record.sent + 0.4
        record.finish = "length"
        self.open -= 1


def test_same_seed_same_prompts_and_no_shared_first_words() -> None:
    one = random_prompts(count=20, words=50, max_tokens=8, spread=0.2, seed=3)
    assert one == random_prompts(count=20, words=50, max_tokens=8, spread=0.2, seed=3)
    assert one != random_prompts(count=20, words=50, max_tokens=8, spread=0.2, seed=4)
    assert len({item.prompt[:40] for item in one.items}) == 20
    assert all(40 <= len(item.prompt.split()) <= 60 for item in one.items)


def test_shared_prefixes_are_shared_within_groups_only() -> None:
    work = shared_prefix(groups=3, per_group=4, prefix_words=30, words=5, max_tokens=2)
    prefixes = [item.prefix for item in work.items]
    assert len(prefixes) == 12 and len(set(prefixes)) == 3
    assert all(prefixes.count(prefix) == 4 for prefix in set(prefixes))


def test_trace_keeps_shared_blocks_and_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1]}\n'
        '{"timestamp": 2500, "input_length": 530, "output_length": 4, "hash_ids": [1]}\n'
    )
    first, second = replay_trace(trace).items
    assert first.prefix == second.prefix and first.prompt != second.prompt
    assert (first.at, second.at) == (0.0, 2.5)
    assert len(first.prompt.split()) == 88


async def test_closed_loop_never_opens_more_than_asked() -> None:
    target = EchoTarget()
    records, _ = await drive(target, random_prompts(count=17, words=3, max_tokens=1), concurrency=4)
    assert len(records) == 17 and target.most_open == 4


async def test_warming_up_opens_as_many_as_will_be_measured() -> None:
    target = EchoTarget()
    await warm_up(target, random_prompts(count=20, words=3, max_tokens=64), 5)
    assert target.most_open == len(target.asked) == 5
    assert {item.max_tokens for item, _ in target.asked} == {WARM_TOKENS}


def test_prompts_become_as_many_ids_as_they_have_words() -> None:
    def spell(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    work = shared_prefix(groups=2, per_group=2, prefix_words=30, words=5, max_tokens=2)
    ids_of = {text: spell(text) for item in work.items for text in (item.prefix, item.prompt)}
    for item in with_token_ids(work, ids_of).items:
        assert item.token_ids == (*spell(item.prefix)[:30], *spell(item.prompt)[:5])
    chat = multi_turn(sessions=1, turns=1, words=4, max_tokens=1)
    assert with_token_ids(chat, {}) == chat
    with pytest.raises(ConfigError, match="--exact"):
        with_token_ids(work, dict.fromkeys(ids_of, [1, 2]))


async def test_turns_of_a_session_carry_what_was_said() -> None:
    target = EchoTarget()
    work = multi_turn(sessions=2, turns=3, words=4, max_tokens=1)
    await drive(target, work, concurrency=2)
    by_session = [(item, history) for item, history in target.asked if item.session == 1]
    assert [len(history) for _, history in by_session] == [0, 2, 4]
    last = by_session[-1][1]
    assert [role for role, _ in last] == ["user", "assistant"] * 2
    assert last[1][1] == f"answer to {by_session[0][0].prompt[:10]}"


async def test_poisson_sends_the_last_one_on_time() -> None:
    target = EchoTarget()
    records, wall = await drive(target, random_prompts(count=10, words=3, max_tokens=1), rate=100.0)
    assert max(record.due for record in records) == pytest.approx(0.1)
    assert wall >= 0.1
    assert all(record.sent >= record.due for record in records)


def test_figures_of_known_records() -> None:
    records = [
        Record(
            sent=1.0, end=2.0, arrivals=[(1.2, 1), (1.4, 1), (2.0, 2)],
            prompt_tokens=8, completion_tokens=4, cached_tokens=4,
        ),
        Record(error="broken"),
    ]  # fmt: skip
    assert records[0].itl == pytest.approx([0.2, 0.3])
    assert records[0].tpot == pytest.approx(0.8 / 3)
    assert records[0].largest_gap == pytest.approx(0.6)
    summary = summarize(records, 2.0, goal_ttft=0.1)
    assert summary["failed"] == 1 and summary["errors"] == ["broken"]
    assert summary["output_tok_per_s"] == 2.0 and summary["cache_hit_rate"] == 0.5
    assert summary["ttft_ms"]["p50"] == 200.0
    assert summary["goodput_per_s"] == 0.0
    assert "broken" in render("t", summary)


@pytest.mark.parametrize(("share", "value"), [(0, 1), (0.5, 2.5), (1, 4), (0.25, 1.75)])
def test_percentile(share: float, value: float) -> None:
    assert percentile([4, 1, 3, 2], share) == pytest.approx(value)


def test_compare_marks_the_better_side() -> None:
    slow = summarize([Record(sent=0, end=2, arrivals=[(1, 1), (2, 1)], completion_tokens=2)], 2.0)
    fast = summarize([Record(sent=0, end=1, arrivals=[(0.5, 1), (1, 1)], completion_tokens=2)], 1.0)
    table = compare(slow, fast)
    assert "+100.0%+" in table and "-50.0%+" in table
    assert "client_queue_ms p99" in table and "goodput" not in table


def test_goodput_is_compared_for_the_same_goals_only() -> None:
    records = [Record(sent=0, end=2, arrivals=[(1, 1), (2, 1)], completion_tokens=2)]
    one, two = summarize(records, 4.0, goal_ttft=2.0), summarize(records, 2.0, goal_ttft=2.0)
    line = next(line for line in compare(one, two).splitlines() if "goodput" in line)
    assert line.split() == ["goodput_per_s", "0.250", "0.500", "+100.0%+"]
    assert "goodput" not in compare(one, summarize(records, 2.0, goal_ttft=3.0))


def test_scenario_files_of_the_repository_are_sound() -> None:
    folder = Path(__file__).parents[2] / "bench" / "scenarios"
    names = set()
    for path in folder.glob("*.toml"):
        scenario = read_scenario(path)
        names.add(scenario.name)
        for load in scenario.loads:
            assert workload_of(scenario, load, seed=1).items
    assert {"cpu-http", "shared-prefix", "chat"} <= names


def test_a_wrong_scenario_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text("loads = []\n[workload]\n[goal]\nx = 1\n")
    with pytest.raises(ConfigError, match="goal"):
        read_scenario(path)
    path.write_text('cache = "tepid"\nloads = []\n[workload]\n')
    with pytest.raises(ConfigError, match="tepid"):
        read_scenario(path)
    with pytest.raises(ConfigError, match="unknown"):
        make_workload({"kind": "nonsense"}, seed=0)
    with pytest.raises(ConfigError, match="wordz"):
        make_workload({"kind": "random", "wordz": 1}, seed=0)
