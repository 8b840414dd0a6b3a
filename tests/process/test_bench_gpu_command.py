"""`python -m bench.gpu` in small on a CPU: every part gives figures, and a part that fails says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.gpu.__main__ import main
from bench.gpu.child import Job
from bench.gpu.engines import run_job
from bench.gpu.folder import read_shape, write_folder
from bench.gpu.guesses import main as guesses
from bench.gpu.sets import SMALL
from bench.tensor_parallel import main as tensor_parallel


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object], str]:
    code = main(["--device", "cpu", "--models", "tiny", "--callers", "2", "--settle", "0", *words])
    printed, errors = capfd.readouterr()
    print(errors, file=sys.stderr)
    return code, json.loads(printed.splitlines()[-1]), printed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def test_parts_in_process_and_over_http(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    parts = "check,eager,batch1,ttft,decode,offline,profile,start,gateway"
    code, result, printed = run(capfd, "--only", parts, "--out", str(out))
    assert code == 0 and json.loads(out.read_text()) == result
    figures = result["figures"]["tiny"]  # type: ignore[index]
    assert all(value > 0 for value in figures.values())
    assert set(figures) == {
        *("offline", "batch1", "ttft 64", "ttft 256", "decode 2", "decode 8", "start", "gateway")
    }
    details = result["details"]["tiny"]  # type: ignore[index]
    assert not [part for part, found in details.items() if "error" in found]
    assert details["check"]["overlap == plain"] == "yes"
    assert details["eager"]["graph == eager"] == "yes"
    assert "batch 8" in printed and "launch" in printed


def test_a_part_that_fails_says_so_and_the_rest_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    code, result, printed = run(capfd, "--only", "batch1,decode", "--", "--context-length", "34")
    details = result["details"]["tiny"]  # type: ignore[index]
    assert code == 0
    assert "tokens instead of" in details["batch1"]["error"]
    assert details["decode"]["8"] > 0


def test_an_engine_that_does_not_start_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    code, result, printed = run(
        capfd, "--only", "batch1,start", "--", "--attention-backend", "flashinfer"
    )
    details = result["details"]["tiny"]  # type: ignore[index]
    assert code == 0
    assert "flashinfer runs on GPUs" in details["build"]["error"]
    assert "flashinfer runs on GPUs" in details["start"]["error"]


def test_an_engine_whose_time_is_over_is_ended(tmp_path: Path) -> None:
    """With whatever code: it may be anywhere when its stacks are read."""
    model = write_folder(tmp_path / "tiny", read_shape("tiny"))
    flags = ["--model", str(model), "--load-format", "dummy", "--device", "cpu"]
    job = Job(flags=flags, cache_folder=str(tmp_path), parts=["check"], sizes=SMALL, limit=60)
    assert "its process ended with code" in dict(run_job(job, 0.1))["engine"]["error"]


def test_an_engine_that_hangs_says_where() -> None:
    """It waits for its job, which does not come."""
    command = [sys.executable, "-m", "bench.gpu.child", "0.5"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(10) == 1
    assert "Timeout" in said and "bench/gpu/child.py" in said


def test_guesses_beside_none(capfd: pytest.CaptureFixture[str]) -> None:
    """On a CPU nothing can be forced; the draft of noise is right now and then."""
    words = ["--shape", "tiny", "--device", "cpu", "--force", "0", "--batches", "2"]
    assert guesses([*words]) == 0
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])["figures"]
    assert figures["plain"]["2"]["steps"] == 299 >= figures["guesses"]["2"]["steps"] > 0


@pytest.mark.parametrize(
    ("command", "flag"), [(main, "--models"), (guesses, "--shape"), (tensor_parallel, "--shape")]
)
def test_a_shape_that_is_not_there_is_refused(
    command: Callable[[list[str]], int], flag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        command(["--device", "cpu", flag, "nosuch"])
    said = capfd.readouterr()
    last = said.err.splitlines()[-1]
    assert leaving.value.code == 2 and not said.out
    assert "error: " in last and "nosuch" in last and "llama-8b" in last
