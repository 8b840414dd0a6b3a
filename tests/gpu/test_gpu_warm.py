"""What one container compiled, another does not: `tandem warm` here, its pack there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from srt.launch.kernel_caches import kernel_caches

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 300


def tandem(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with a cache of its own."""
    environment = {
        name: value for name, value in os.environ.items() if name not in kernel_caches("")
    }
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(":")]
    run = subprocess.run(
        [sys.executable, "-m", "srt.cli.main", *words],
        env=environment | {"TANDEM_CACHE": str(cache), "PYTHONPATH": ":".join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        cwd=ROOT,
    )
    assert run.returncode in (0, 1), run.stderr
    return run


@pytest.mark.timeout(MOST_SECONDS)
@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_a_pack_spares_another_cache_every_compile(model: Path, tmp_path: Path) -> None:
    flags = ("--model", str(model), "--load-format", "dummy", "--device", "cuda")
    flags += ("--max-total-tokens", "8192", "--max-running", "8")
    pack = tmp_path / "kernels.tgz"
    cold = tandem(tmp_path / "a", "warm", *flags, "--pack", str(pack))
    assert "compile: " in cold.stderr and "warm in " in cold.stdout
    tandem(tmp_path / "b", "warm", "--unpack", str(pack))
    said = tandem(tmp_path / "b", "doctor").stdout
    assert "kernel-cache" in said and " 0 Triton kernels" not in said
    warm = tandem(tmp_path / "b", "warm", *flags)
    assert "compile: " not in warm.stderr, warm.stderr
