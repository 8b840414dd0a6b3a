"""A CUDA error in a step: every request that was alive is told, and the process ends with a code that is
not zero. In a process of its own, whose context is lost with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path

import torch
from gpu_engine import ask, build

from srt.scheduler.build import build_scheduler
from srt.scheduler.process import run
from srt.launch.parts import scheduler_settings
from srt.wire.messages import Tokens


class Breaking:
    '''A worker whose sixth step reads what is not there.'''

    def __init__(self, worker):
        self._worker, self.facts, self._steps = worker, worker.facts, 0

    def launch(self, batch):
        self._steps += 1
        if self._steps == 6:
            torch.zeros(1, device="cuda")[torch.tensor([10**6], device="cuda")]
        return self._worker.launch(batch)

    def close(self):
        pass


class Inbox:
    '''All requests at once, then silence.'''

    def __init__(self, works):
        self._works = works

    def drain(self, timeout):
        works, self._works = self._works, []
        return works


class Outbox:
    def send(self, message):
        if isinstance(message, Tokens):
            for item in message.all_items():
                if item.finish is not None:
                    print(item.uid, item.finish.reason, item.finish.failure.code, flush=True)


with build(Path(sys.argv[1]), sys.argv[2]) as built:
    settings = scheduler_settings()
    scheduler = build_scheduler(Breaking(built.worker), settings, Outbox(), lambda: 0.0)
    run(scheduler, Inbox([ask(n, 30) for n in range(12)]), lambda: False)
"""


def test_an_error_of_the_device_ends_requests_and_process(model: Path, cache: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), cache],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode not in (0, None), ended.stderr[-2000:]
    told = [line.split() for line in ended.stdout.splitlines()]
    assert sorted(int(uid) for uid, *_ in told) == list(range(12)), ended.stderr[-2000:]
    assert {reason for _, reason, _ in told} == {"error"}
    codes = {int(uid): code for uid, _, code in told}
    assert {codes[uid] for uid in range(8)} == {"internal"}  # the model was at work on these
    assert {codes[uid] for uid in range(8, 12)} == {"engine_dead"}
