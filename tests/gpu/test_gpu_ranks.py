"""A model divided among two GPUs: the tokens of one."""

from __future__ import annotations

import pytest
import torch

from bench.tensor_parallel import main


@pytest.mark.timeout(280)
def test_two_gpus_answer_as_one_does(capfd: pytest.CaptureFixture[str]) -> None:
    """In float32, greedy and drawn, with sums by NCCL and direct ones."""
    if torch.cuda.device_count() < 2:
        pytest.skip("it takes two GPUs")
    code = main(["--check-only", "--limit", "85"])  # three engines
    told = capfd.readouterr()
    assert code == 0, told.out + told.err
