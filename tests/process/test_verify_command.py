"""`tandem verify` as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOKENS = [" one", " two", " three", " sea", " ship", " the", " a"]
# A cache that says of a prompt's tokens that they are another's; everything else is right.
FAULT = """
import sys
from srt.scheduler.step import Receiving
right = Receiving._take_tokens
def wrong(self, request, got, now):
    if request.cached_tokens:
        got.tokens[0] = (got.tokens[0] + 1) % 256
    right(self, request, got, now)
Receiving._take_tokens = wrong
from srt.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run(*words: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-m", "srt.cli.main"] if program is None else ["-c", program]
    return subprocess.run(
        [sys.executable, *start, "verify", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=90,
    )  # fmt: skip


@pytest.fixture
def model(script: Callable[..., str]) -> str:
    return script(TOKENS, [256 + i % 7 for i in range(60)], context_length=1024)


def test_the_table_and_the_exit_code(model: str) -> None:
    done = run("--model", model)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["variant", "requests", "equal"]
    assert any(line.startswith("speculation: draft") and "not run" in line for line in lines)
    assert "every answer is the same" in lines[-1] and "kernels: none" in done.stdout


def test_one_line_of_json(model: str) -> None:
    done = run("--model", model, "--json", "--page-size", "8", "--max-itl-ms", "50")
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    found = json.loads(line)
    assert found["equal"] is True and found["exact_kernels"] is True
    names = [row["name"] for row in found["variants"]]
    assert names[0] == "baseline" and names[-1] == "your settings" and "page size 16" in names
    assert all(row["requests"] == row["equal"] for row in found["variants"])


def test_a_planted_fault_is_found(model: str) -> None:
    done = run("--model", model, "--json", program=FAULT)
    assert done.returncode == 1, done.stderr
    wrong = {row["name"]: row for row in json.loads(done.stdout)["variants"] if row["differences"]}
    assert set(wrong) == {"caching", "all of it", "your settings"}
    first = wrong["caching"]["differences"][0]
    assert first["position"] == 0 and first["expected"] != first["found"]
    done = run("--model", model, program=FAULT)
    assert done.returncode == 1 and "ANSWERS DIFFER" in done.stdout and "instead of" in done.stdout


def test_a_wish_that_cannot_be_met_is_refused_as_by_serve(model: str) -> None:
    done = run("--model", model, "--max-itl-ms", "50", "--chunked-prefill-size", "0")
    assert done.returncode == 2 and "whole prompts" in done.stderr
