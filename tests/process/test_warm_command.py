"""`tandem warm` as a user types it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from srt.cli.main import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 48, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, and pytest's logging stays."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    root.handlers, root.level = before


def test_a_shape_without_weights_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kind of step runs, on whichever device there is."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ("--model", str(tmp_path), "--load-format", "dummy", "--device", "cpu")
    assert main(["warm", *words, "--dtype", "float32", "--page-size", "4"]) == 0
    said = capsys.readouterr()
    assert "engine: steps of 46 tokens" in said.err
    assert said.out.startswith("warm in ")


def test_a_script_is_warm_at_once(
    script: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", "--model", script(["one", "two"])]) == 0
    assert "warm in " in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_refused(
    tmp_path: Path,
    script: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file" / "cache"))
    assert main(["warm", "--model", script(["a"])]) == 2
    said = capsys.readouterr()
    assert str(tmp_path / "file" / "cache") in said.err and "Not a directory" in said.err
    assert not said.out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--pack a.tgz --unpack b.tgz", "give one of them"),
        ("--unpack nowhere.tgz", "nowhere.tgz"),
        ("--max-n many", "--max-n"),
    ],
)
def test_wrong_use(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["warm", *words.split()])
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    assert code == 2
    assert hint in capsys.readouterr().err
