"""What differs between the three generating endpoints: how an answer looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from srt.gateway.choice import Choice
from srt.wire.messages import Output


class Shape(Protocol):
    """Makes plain dictionaries; the exchange sends them."""

    def opening(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """Events before anything was generated."""
        ...

    def pieces(self, choice: Choice, item: Output) -> Iterator[dict[str, Any]]:
        """Events for one output, which `choice` has already taken."""
        ...

    def closing(self, choices: list[Choice]) -> Iterator[dict[str, Any]]:
        """Events after all choices are finished."""
        ...

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        """The answer in one piece."""
        ...
