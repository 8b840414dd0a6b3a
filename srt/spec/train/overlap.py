"""Keeps held-out prompts out of training: no prompt that equals one, none that shares a run of words."""

from __future__ import annotations

import re
from collections.abc import Iterable

RUN = 8  # so many equal words in a row are no accident

_WORD = re.compile(r"\w+")


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class HeldOut:
    """`refuses(text)`: `text` equals a held-out prompt but for case and punctuation, or the two have
    `RUN` words in a row in common."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._whole: set[tuple[str, ...]] = set()
        self._runs: set[tuple[str, ...]] = set()
        for prompt in prompts:
            words = _words(prompt)
            self._whole.add(tuple(words))
            self._runs.update(_runs(words))

    def refuses(self, text: str) -> bool:
        words = _words(text)
        return tuple(words) in self._whole or any(run in self._runs for run in _runs(words))


def _runs(words: list[str]) -> Iterable[tuple[str, ...]]:
    return (tuple(words[at : at + RUN]) for at in range(len(words) - RUN + 1))
