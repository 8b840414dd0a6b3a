"""Commands, metrics, the profile, the process loop and the scripted worker."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from scheduler_fakes import Box, HashWorker, prompt, work

from srt.launch.parts import PhaseWatch
from srt.metrics.registry import Registry
from srt.metrics.table import ROWS, SECONDS
from srt.runner.script import Script, ScriptedWorker, load_script
from srt.scheduler.build import build_scheduler
from srt.scheduler.process import IDLE_SECONDS, run
from srt.scheduler.replay import replay
from srt.wire.channels import ChannelClosed
from srt.wire.messages import AbortWork, Command, Turn

NAMES = """
requests_running requests_waiting waiting_tokens kv_usage_ratio kv_tokens_used kv_tokens_evictable
kv_tokens_free prefill_room_tokens prefix_tokens_asked_total prefix_tokens_hit_total prompt_tokens_total
generation_tokens_total requests_finished_total requests_rejected_total aborted_total
retractions_total retracted_tokens_total draft_verifications_total draft_tokens_total
draft_accepted_total audit_failures_total ttft_seconds itl_seconds itl_broken_total e2e_seconds
queue_seconds prefill_seconds decode_seconds step_seconds host_seconds_total steps_total memory_bytes
startup_seconds grammar_compile_seconds grammar_refused_total
""".split()


def test_metric_names_are_frozen() -> None:
    """Dashboards depend on them. Adding one is fine; a change of this list is not."""
    assert [row.name for row in ROWS] == NAMES
    assert (SECONDS[0], SECONDS[-1]) == (0.001, 600.0) and sorted(SECONDS) == list(SECONDS)


def test_registry_counts_and_refuses_nonsense() -> None:
    registry = Registry()
    registry.observe("itl_seconds", 0.0005)
    registry.observe("itl_seconds", 0.001)
    registry.observe("itl_seconds", 7000.0)
    registry.observe("itl_seconds", -3.0)
    sample = registry.snapshot()["tandem_itl_seconds"]["samples"][0][1]
    assert (sample["counts"][0], sample["counts"][-1], sample["count"]) == (3, 1, 4)
    registry.put_all("requests_waiting", {"pages": 2})
    registry.put_all("requests_waiting", {"rows": 1})
    assert registry.snapshot()["tandem_requests_waiting"]["samples"] == [
        [{"reason": "pages"}, 0.0], [{"reason": "rows"}, 1],
    ]  # fmt: skip
    for wrong in (
        lambda: registry.add("steps_total", -1),
        lambda: registry.put("requests_running", -1),
        lambda: registry.add("aborted_total"),
        lambda: registry.add("requests_running"),
    ):
        with pytest.raises(AssertionError):
            wrong()
    with pytest.raises(KeyError):
        registry.add("no_such_metric")


def value(box: Box, name: str, **labels: str) -> Any:
    body = box.ask("metrics").body
    return next(v for found, v in body["tandem_" + name]["samples"] if found == labels)


@pytest.mark.parametrize("draft", [0, 3])
def test_probes_of_health_are_in_no_metric_of_requests(draft: int) -> None:
    """Served, rejected, aborted, with guesses or without: only steps and time show that they were."""
    box = Box(draft_tokens=draft, draft_eager=True)

    def seen() -> dict[str, Any]:
        found = box.ask("metrics").body
        return {
            name: entry["samples"]
            for name, entry in found.items()
            if not any(word in name for word in ("step", "host", "kv_", "room"))
        }

    box.run(work(1, prompt(1, 20), 6))
    before, steps = seen(), box.steps
    assert before["tandem_requests_finished_total"] == [[{"reason": "length"}, 1.0]]
    box.run(work(2, prompt(1, 20), 6, is_probe=True))
    box.turn(work(3, prompt(3, 20), 6, is_probe=True))
    box.run(AbortWork(uid=3))
    box.run(work(4, prompt(4, 600), 6, is_probe=True))
    assert [box.finish(uid).reason for uid in (2, 3, 4)] == ["length", "abort", "error"]
    assert seen() == before and box.steps > steps
    box.run(work(5, prompt(1, 20), 6))
    assert seen() != before


def test_metrics_add_up() -> None:
    box = Box()
    box.run(work(1, prompt(1, 20), 5), work(2, prompt(2, 20), 7))
    box.run(work(3, prompt(1, 20), 5), work(4, []))
    assert value(box, "generation_tokens_total") == 17
    assert value(box, "prompt_tokens_total") == 60
    assert value(box, "prefix_tokens_asked_total") == 60
    assert value(box, "prefix_tokens_hit_total", tier="device") == 16
    assert value(box, "requests_finished_total", reason="length") == 3
    assert value(box, "requests_rejected_total", reason="invalid_value") == 1
    assert value(box, "ttft_seconds")["count"] == 3
    assert value(box, "itl_seconds")["count"] == 14
    assert value(box, "requests_running") == 0 and value(box, "kv_tokens_used") == 0
    free, cached = value(box, "kv_tokens_free"), value(box, "kv_tokens_evictable")
    assert free + cached == 63 * 4 and cached > 0


def test_commands() -> None:
    box = Box(max_running=1)
    box.turn(work(1, prompt(1, 6), 30), work(2, prompt(2, 6), 30, index=1))
    assert box.ask("config").body == {"policy": "fcfs"}
    assert box.ask("audit").body == {"clean": True, "violations": []}
    assert box.ask("request", "nobody").failure.code == "not_found"
    assert box.ask("health").failure.code == "invalid_value"
    body = box.ask("requests").body
    assert (body["running"], body["waiting"]) == (1, 1)
    assert [entry["rid"] for entry in body["requests"]] == ["r1", "r2"]
    one = box.ask("request", "r1").body["requests"][0]
    assert one["state"] == "running" and one["cache"]["reason"] == "empty"
    assert one["timing"]["queue"] >= 0 and one["waits_for"] is None
    box.turn(Turn(number=7))
    assert box.turns == [7]


def test_flush_waits_for_idle_or_says_how_many_are_live() -> None:
    box = Box()
    box.turn(work(1, prompt(1, 6), 30))
    refused = box.ask("flush_cache")
    assert refused.failure.code == "not_ready" and "1 requests are live" in refused.failure.message
    assert box.ask("flush_cache", "soon").failure.param == "argument"
    box.turn(Command(ticket=5, topic="flush_cache", argument="0.05"))
    box.turn(Command(ticket=6, topic="flush_cache", argument="100"))
    assert 6 not in box.replies
    box.run()
    assert box.replies[5].failure.code == "not_ready"
    assert box.replies[6].body["freed_pages"] == 8
    assert box.ask("flush_cache").body == {"freed_pages": 0}
    box.run(work(2, prompt(1, 6), 3))
    assert box.finish(2).usage.cached_tokens == 0


@pytest.mark.parametrize("depth", (0, 1))
def test_profile(depth: int) -> None:
    script = Script(pieces=[], end_token_ids=[0], script=[65] * 40)
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-4
        return now[0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    worker = ScriptedWorker(
        script, num_pages=64, page_size=4, max_rows=4, step_seconds=0.02, clock=clock, sleep=sleep
    )
    box = Box(worker, depth=depth, max_running=2)
    box.clock = clock  # type: ignore[method-assign]
    box.scheduler._clock = clock
    box.run(work(1, [70, 71], 20), work(2, [72], 20), work(3, [73], 20))
    groups = box.ask("profile").body["groups"]
    assert groups["decode 2"]["phases"]["forward"] == pytest.approx(0.02)
    assert groups["decode 2"]["engine_share"] < 0.1
    assert 0 < groups["decode 2"]["stages"]["wait"] <= 0.02
    assert box.ask("profile").body["waiting"]["rows"] > 5


class Inbox:
    """Messages by call; remembers how long the loop was ready to wait."""

    def __init__(self, calls: list[list[Any]]) -> None:
        self.calls = calls
        self.timeouts: list[float | None] = []

    def drain(self, timeout: float | None) -> list[Any]:
        self.timeouts.append(timeout)
        if not self.calls:
            if timeout == 0:
                return []
            raise ChannelClosed
        return self.calls.pop(0)

    def close(self) -> None:
        pass


def test_the_process_polls_while_busy_and_sleeps_while_idle() -> None:
    box = Box()
    inbox = Inbox([[], [work(1, [1, 2], 5)]])
    run(box.scheduler, inbox, lambda: False)
    assert box.finish(1).reason == "length"
    idle = [index for index, timeout in enumerate(inbox.timeouts) if timeout == IDLE_SECONDS]
    assert idle == [1, len(inbox.timeouts) - 1]
    assert set(inbox.timeouts) == {0, IDLE_SECONDS}
    run(box.scheduler, Inbox([]), lambda: True)
    failing = Box(HashWorker(raise_at=1))
    with pytest.raises(RuntimeError):
        run(failing.scheduler, Inbox([[work(1, [1], 5)]]), lambda: False)
    assert failing.finish(1).failure.code == "internal"


class Chores(HashWorker):
    """A worker with so much to do in quiet moments; notes what it had launched by then."""

    def __init__(self, num_chores: int) -> None:
        super().__init__()
        self.num_chores = num_chores
        self.done: list[int] = []

    def idle(self) -> bool:
        self.done.append(len(self.batches))
        return len(self.done) < self.num_chores


def test_a_worker_does_its_chores_while_nobody_is_served(tmp_path: Path) -> None:
    """One between two looks into the inbox, none during a request; then the loop sleeps. A journal
    in between changes nothing."""
    for journal in (None, tmp_path / "journal"):
        worker, box = Chores(4), Box()
        scheduler = build_scheduler(worker, box.settings, box, box.clock, box.config, journal)
        inbox = Inbox([[], [], [work(1, [1, 2], 5)]])
        run(scheduler, inbox, lambda: False)
        assert box.finish(1).reason == "length"
        steps = len(worker.batches)
        assert worker.done == [0, 0, steps, steps] and steps > 3
        assert inbox.timeouts[-4:] == [0, 0, 0, IDLE_SECONDS]
        scheduler.close()
    assert replay(tmp_path / "journal").difference is None


def scripted(path: Path) -> ScriptedWorker:
    content = {
        "tokens": ["go", {"bytes": [226, 130]}, "<end>"], "end_token_ids": [258],
        "script": [256, 65, 257], "scripts": {"Hi": [66]}, "context_length": 64,
    }  # fmt: skip
    (path / "tandem_script.json").write_text(json.dumps(content))
    return ScriptedWorker(load_script(path), num_pages=33, page_size=4, max_rows=4)


@pytest.mark.parametrize("depth", (0, 1))
def test_scripted_worker_follows_its_script(tmp_path: Path, depth: int) -> None:
    box = Box(scripted(tmp_path), depth=depth)
    box.run(
        work(1, [88], 9, ignore_eos=False),
        work(2, [72, 105], 9, ignore_eos=False),
        work(3, [88], 5, logit_bias={65: -100.0}),
        work(4, [88], 9, ignore_eos=False, min_tokens=5),
        work(5, [88, 89], 1, logprobs=2, prompt_logprobs=1),
    )
    assert box.tokens(1) == [256, 65, 257, 258] and box.finish(1).matched == 258
    assert box.tokens(2) == [66, 258]
    assert box.tokens(3) == [256, 257, 257, 258, 258]
    assert box.tokens(4) == [256, 65, 257, 0, 0, 258]
    item = next(item for item in box.items[5] if item.tokens)
    assert item.logprobs[0].chosen == item.logprobs[0].top[0] and len(item.logprobs[0].top) == 2
    assert item.prompt_logprobs[0] is None and item.prompt_logprobs[1].chosen.token == 89


def test_scripts_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "tandem_script.json"
    path.write_text(json.dumps({"end_token_ids": [0], "script": [256]}))
    with pytest.raises(ValueError, match="256"):
        load_script(tmp_path)


def test_a_watch_knows_how_long_each_phase_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.0, 14.0, 14.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    shown: list[tuple[str, float | None]] = []
    watch = PhaseWatch(lambda phase, fraction: shown.append((phase, fraction)))
    watch.show("weights", None)
    watch.show("weights", 0.5)
    watch.show("warm-up", None)
    assert watch.end() == {"weights": 3.0, "warm-up": 0.5}
    assert shown == [("weights", None), ("weights", 0.5), ("warm-up", None)]
