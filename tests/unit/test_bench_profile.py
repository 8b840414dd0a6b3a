"""The table of a step's time: what is in it, in which order; many sizes do not make it endless."""

from __future__ import annotations

from bench.profile import MOST_GROUPS, render_profile
from srt.scheduler.profile import StepLog, StepRecord


def record(step: int, decodes: int, prompts: int = 0) -> StepRecord:
    return StepRecord(
        step=step,
        num_decodes=decodes,
        num_prefill_tokens=prompts,
        stages={"schedule": 1e-3, "launch": 2e-3, "wait": 4e-3, "process": 5e-4},
        phases={"forward": 6e-3, "launch": 1.5e-3},
    )


def test_host_and_device_stand_side_by_side() -> None:
    log = StepLog(100)
    for step, decodes in enumerate((128, 2, 16, 2)):
        log.add(record(step, decodes))
    log.add(record(4, 2, prompts=700))
    lines = render_profile(log.summary()).splitlines()
    assert [line[:10].strip() for line in lines[2:]] == [
        "decode 2", "decode 16", "decode 128", "prefill",
    ]  # fmt: skip
    names, values = lines[1].split(), lines[2].split()
    found = dict(zip(names[2:], values[2:], strict=True))  # "step of" and "decode 2" are two words
    assert (found["steps"], found["ms"], found["wait"], found["host"]) == (
        "2",
        "7.50",
        "4.000",
        "3.500",
    )
    assert (found["forward"], found["engine"]) == ("6.000", "20.0%")
    assert "sample" not in names and names.count("launch") == 2


def test_the_rarest_sizes_are_summed_up() -> None:
    log = StepLog(1000)
    for step in range(1, MOST_GROUPS + 5):
        for _ in range(step):
            log.add(record(step, step))
    lines = render_profile(log.summary()).splitlines()
    assert len(lines) == 2 + MOST_GROUPS + 1
    assert lines[-1] == "and 10 steps of 4 other sizes"
    assert render_profile(StepLog(5).summary()) == "no steps yet"
