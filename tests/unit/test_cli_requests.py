"""`tandem generate` and `tandem chat` before an engine is there: what cannot be asked starts none."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import pytest

from srt.cli import chat, generate
from srt.cli.main import main
from srt.cli.sampling import DEFAULT_MAX_TOKENS, sampling_params


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(options: argparse.Namespace) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(chat, "running_engine", start)
    monkeypatch.setattr(generate, "running_engine", start)


@pytest.mark.parametrize("words", [["generate", "a"], ["chat"]])
@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--max-tokens", "-3", "0 or more"),
        ("--temperature", "9", "0.0 to 2.0"),
        ("--temperature", "nan", "0.0 to 2.0"),
        ("--top-p", "0", "more than 0.0"),
        ("--top-k", "-1", "0 to"),
        ("--request-seed", "99999999999999999999", "it must be"),
    ],
)
def test_a_number_out_of_range_names_its_flag(
    words: list[str], flag: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, flag, value]) == 2
    said = capsys.readouterr().err
    assert f"{flag} is " in said and allowed in said


def test_generate_ends_and_chat_talks_on() -> None:
    for module, most in ((generate, DEFAULT_MAX_TOKENS), (chat, None)):
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        assert sampling_params(parser.parse_args([])).max_tokens == most
        assert sampling_params(parser.parse_args(["--max-tokens", "7"])).max_tokens == 7
        end = "the end of the context" if most is None else str(most)
        assert f"at most (default: {end})" in " ".join(parser.format_help().split())


def latin(text: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(text.encode("latin-1")), encoding="utf-8")


def test_a_prompt_that_is_no_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts"
    path.write_bytes("caf\xe9\n".encode("latin-1"))
    assert main(["generate", "--file", str(path)]) == 2
    assert f"--file {path} is not text in UTF-8" in capsys.readouterr().err
    assert main(["generate", "--file", str(tmp_path / "nothing")]) == 2
    assert "No such file" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", latin("caf\xe9"))
    assert main(["generate", "-"]) == 2
    assert "stdin is not text in UTF-8" in capsys.readouterr().err


def test_a_line_that_is_no_text_does_not_end_a_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", latin("caf\xe9\n"))
    assert chat.read_line() == ""
    assert "not text in UTF-8" in capsys.readouterr().err
    assert chat.read_line() is None
