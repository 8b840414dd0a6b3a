"""What a child process needs to publish the very configuration of its parent, as JSON."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from srt.config.args import ServerArgs
from srt.config.facts import Facts
from srt.config.trail import InputSource
from srt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """The inputs of `resolve`. Holds the keys in the clear: pass it over a pipe, never in a command
    line or a log."""

    args: ServerArgs
    facts: Facts
    sources: dict[str, InputSource]
    entropy: int


def encode(boot: Boot) -> bytes:
    return msgspec.json.encode(boot)


def decode(data: bytes) -> Boot:
    """Raises ConfigError on anything but the bytes of `encode`."""
    try:
        return msgspec.json.decode(data, type=Boot)
    except msgspec.DecodeError as error:
        raise ConfigError(f"these are not a parent's boot bytes: {error}") from None
