"""SIGTERM to a command that has an engine of its own: no folder and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "srt.cli.main", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
        text=True,
    )


@pytest.mark.parametrize("moment", ["starting", "answering", "many answers", "chat"])
def test_sigterm_leaves_nothing(tmp_path: Path, script: Callable[..., str], moment: str) -> None:
    model = script(["a"], script=[256] * 500, step_seconds=0.1)
    home = tmp_path / "tmp"
    home.mkdir()
    if moment == "chat":
        words = ["chat"]
    elif moment == "many answers":
        prompts = tmp_path / "prompts"
        prompts.write_text("x\n" * 200)
        words = ["generate", "--file", str(prompts)]
    else:
        words = ["generate", "x"]
    command = start(home, *words, "--model", model)
    try:
        assert command.stdout is not None and command.stderr is not None
        if moment == "answering":
            assert command.stdout.read(1) == "a"
        else:
            last = "tokenizer: ready" if moment != "starting" else "scheduler"
            for line in command.stderr:
                if last in line:
                    break
        if moment in ("many answers", "chat"):
            time.sleep(0.5)
        children = psutil.Process(command.pid).children()
        assert children or moment == "starting"
        command.send_signal(signal.SIGTERM)
        _, errors = command.communicate(timeout=20)
    finally:
        command.kill()
        command.wait(20)
    assert command.returncode == 143, errors
    assert "Traceback" not in errors
    assert not [child for child in children if child.is_running()]
    assert not list(home.glob("tandem-*"))
