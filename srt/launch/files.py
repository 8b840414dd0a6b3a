"""Files that flags name, looked at before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from srt.config.args import ServerArgs
from srt.errors import ConfigError


def check_files(args: ServerArgs) -> None:
    """Raises ConfigError for a file that cannot be read or a place where none can be written."""
    for flag, name in (
        ("--chat-template", args.chat_template),
        ("--tokenizer", args.tokenizer),
    ):
        if name is not None and not os.access(name, os.R_OK):
            raise ConfigError(f"{flag} {name}: {_why_not(Path(name))}")
    if args.chat_template is not None and not Path(args.chat_template).is_file():
        raise ConfigError(f"--chat-template {args.chat_template}: it is no file")
    if args.journal is not None:
        _check_writable("--journal", Path(args.journal))


def _why_not(path: Path) -> str:
    return "it may not be read" if path.exists() else "it is not there"


def _check_writable(flag: str, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: it is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: the folder {path.parent} is not there; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: it may not be written; choose another place")
