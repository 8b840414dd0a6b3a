"""A ring of step records: what each step held, who waited for what, and where the time went."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

STAGES = ("inbox", "schedule", "launch", "wait", "process", "send")
PHASES = ("draft", "prepare", "launch", "forward", "sample")


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One turn of the loop that brought a step home. Seconds.

    `stages` are the scheduler's own (see STAGES); `phases` are the worker's, for the step received.
    In the overlap loop the two run side by side, so only `wait` is time that nobody used.
    """

    step: int = -1
    num_decodes: int = 0
    num_prefill_tokens: int = 0
    offered: int | None = None  # prompt tokens there was room for; None: the step had no prompt
    reasons: dict[str, int] = field(default_factory=dict)  # how many waited for what
    stages: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)


class StepLog:
    """The last `size` records. `promise` says what `--max-itl-ms` knows; None if nothing is promised."""

    def __init__(
        self, size: int, promise: Callable[[], dict[str, Any] | None] = lambda: None
    ) -> None:
        self._promise = promise
        self._records: deque[StepRecord] = deque(maxlen=max(size, 1))

    def add(self, record: StepRecord) -> None:
        self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    def summary(self) -> dict[str, Any]:
        """Medians per stage and phase, over all decode-only steps of one size and over all steps with
        prefill.

        `engine_share` is the part of a turn that was not the model's forward: 1 - forward / total,
        with total the sum of the stages. In the overlap loop it is what the engine adds to the wait:
        (total - wait) / total is then an upper bound, reported as `busy_share`. Groups come by size.
        """
        groups: dict[str, list[StepRecord]] = {}
        for record in self._records:
            name = f"decode {record.num_decodes}" if not record.num_prefill_tokens else "prefill"
            groups.setdefault(name, []).append(record)
        waiting: Counter[str] = Counter()
        for record in self._records:
            waiting.update(record.reasons)
        return {
            "steps": len(self._records),
            "waiting": dict(sorted(waiting.items())),
            "promise": self._promise(),
            "groups": {name: _summarize(groups[name]) for name in sorted(groups, key=_size)},
        }


def _size(group: str) -> int:
    """Decodes in a step of this group; prompts come behind all."""
    return int(group.removeprefix("decode ")) if group != "prefill" else 1 << 62


def _summarize(records: list[StepRecord]) -> dict[str, Any]:
    stages = {name: median(r.stages.get(name, 0.0) for r in records) for name in STAGES}
    phases = {name: median(r.phases.get(name, 0.0) for r in records) for name in PHASES}
    total = sum(sum(r.stages.values()) for r in records)
    forward = sum(r.phases.get("forward", 0.0) for r in records)
    wait = sum(r.stages.get("wait", 0.0) for r in records)
    return {
        "steps": len(records),
        "decodes": median(r.num_decodes for r in records),
        "prefill_tokens": median(r.num_prefill_tokens for r in records),
        "prefill_room": median(r.offered or 0 for r in records),
        "stages": stages,
        "phases": phases,
        "host_seconds": median(sum(r.stages.values()) - r.stages.get("wait", 0.0) for r in records),
        "step_seconds": median(sum(r.stages.values()) for r in records),
        "engine_share": max(1 - forward / total, 0.0) if total > 0 else 0.0,
        "busy_share": 1 - wait / total if total > 0 else 0.0,
    }
