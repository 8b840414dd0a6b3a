"""What the commands say about GPUs: doctor, the ready line, and a GPU that nobody uses."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from config_gpu import gpu_facts

from srt.cli.doctor import check_gpus, check_kernel_caches
from srt.cli.serve import print_ready, warn_of_idle_gpu
from srt.config.args import ServerArgs
from srt.config.dummy import dummy_facts
from srt.config.facts import Facts
from srt.config.resolve import resolve
from srt.launch.kernel_caches import ready_folder

NO_TRITON = gpu_facts(without=("triton", "flashinfer-python"))


def findings(facts: Facts) -> dict[str, tuple[str, str]]:
    return {each.subject: (each.level, each.text) for each in check_gpus(facts.machine)}


def test_doctor_shows_each_gpu_and_what_is_installed() -> None:
    found = findings(gpu_facts())
    assert found["gpu-0"] == (
        "ok", "NVIDIA H200, sm_90, 150.0 GB (149.5 free), driver 580.65.06",
    )  # fmt: skip
    assert found["gpu-use"] == ("ok", "models run on gpu 0, with CUDA 13.0")
    assert (found["triton"], found["flashinfer-python"]) == (("ok", "3.6.0"), ("ok", "0.6.12"))


def test_doctor_says_why_a_gpu_is_not_used() -> None:
    found = findings(NO_TRITON)
    assert found["gpu-use"][0] == "note" and "triton is not installed" in found["gpu-use"][1]
    assert found["triton"][0] == "note" and "tandem-serve[gpu]" in found["triton"][1]
    (only,) = check_gpus(dummy_facts().machine)
    assert only.level == "note" and "this machine has no GPU" in only.text


def test_doctor_counts_what_is_compiled(tmp_path: Path) -> None:
    machine = gpu_facts().machine
    assert check_kernel_caches(tmp_path, dummy_facts().machine) == []
    (cold,) = check_kernel_caches(tmp_path, machine)
    assert cold.level == "note" and "tandem warm" in cold.text
    ready = ready_folder(str(tmp_path), machine)
    assert ready is not None
    for path in (tmp_path / "gpu/triton/KEY/add.cubin", ready / "flashinfer_jit_cache/a/a.so"):
        path.parent.mkdir(parents=True)
        path.touch()
    (warm,) = check_kernel_caches(tmp_path, machine)
    assert warm.level == "ok"
    assert warm.text.startswith("1 Triton kernels, 1 FlashInfer operators in ")


def test_ready_line_names_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    resolution = resolve(ServerArgs(), gpu_facts(), entropy=1)
    print_ready(resolution, {}, 1.0)
    assert "dummy on NVIDIA H200; " in capsys.readouterr().err
    resolution = resolve(ServerArgs(device="cuda"), gpu_facts(), entropy=1)
    print_ready(resolution, {}, 1.0)
    assert "dummy on cuda; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("facts", "args", "words"),
    [
        (NO_TRITON, ServerArgs(), "the model runs on the CPU: triton is not installed"),
        (NO_TRITON, ServerArgs(device="cpu"), ""),
        (gpu_facts(), ServerArgs(), ""),
        (dummy_facts(), ServerArgs(), ""),
        (gpu_facts(model={"format": "script", "architecture": "Script"}), ServerArgs(), ""),
    ],
)
def test_a_gpu_that_is_not_used_is_no_secret(
    facts: Facts, args: ServerArgs, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_idle_gpu(facts, resolve(args, facts, entropy=1))
    assert (words in caplog.text) if words else not caplog.text
