"""The parser of `tandem` and of every command: whoever mistypes a flag sees that command's usage and the
nearest flag that it has."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from srt.config.leaves import suggest


class Parser(argparse.ArgumentParser):
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Nothing may be left over: a command's parser is asked by the one above it, which would only
        know its own usage."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            wrong = next((word for word in rest if word.startswith("-")), rest[0])
            flags = self._option_string_actions if wrong.startswith("--") else ()
            near = suggest(wrong.partition("=")[0], flags)
            self.error(f"unrecognized arguments: {' '.join(rest)}{near}")
        return found, rest
