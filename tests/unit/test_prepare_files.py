"""Files that flags name are looked at before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from srt.config.args import ServerArgs
from srt.errors import ConfigError
from srt.launch.files import check_files


def test_files_that_are_there_pass(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("x")
    journal = str(tmp_path / "journal")
    check_files(ServerArgs())
    check_files(ServerArgs(chat_template=str(template), tokenizer=str(tmp_path), journal=journal))
    assert not Path(journal).exists()


@pytest.mark.parametrize(
    ("field", "name", "words"),
    [
        ("journal", "nope/deep/journal", "is not there; make it first"),
        ("journal", "", "it is a folder"),
        ("chat_template", "nope.jinja", "it is not there"),
        ("chat_template", "", "it is no file"),
        ("tokenizer", "nope.json", "it is not there"),
    ],
)
def test_what_cannot_be_had_names_its_flag(
    tmp_path: Path, field: str, name: str, words: str
) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError) as caught:
        check_files(ServerArgs(**{field: str(path)}))
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--{field.replace('_', '-')} {path}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="may not be written"):
        check_files(ServerArgs(journal=str(tmp_path / "journal")))
