"""`tandem replay JOURNAL`: run what `tandem serve --journal JOURNAL` recorded again, without a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from srt.errors import ConfigError
from srt.scheduler.replay import replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", type=Path, help="the file that --journal wrote")


def run(options: argparse.Namespace) -> int:
    try:
        result = replay(options.journal)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{options.journal}: {error}") from None
    print(f"{result.num_turns} turns, {result.num_steps} steps")
    if result.difference is not None:
        print(f"the replay went another way: {result.difference}")
        return 1
    print("every step is the recorded one")
    return 0
