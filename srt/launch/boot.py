"""What every child needs to know before it knows anything: one JSON line down its stdin."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from srt.config.args import ServerArgs
from srt.config.facts import Facts
from srt.config.trail import InputSource
from srt.wire.topology import Addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """The same record for all children, so that all of them resolve the same configuration."""

    args: ServerArgs
    sources: dict[str, InputSource]
    facts: Facts
    addresses: Addresses
    engine_id: str
    entropy: int
    cache_folder: str  # compiled kernels and fetched models

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, line: bytes) -> Boot:
        return msgspec.json.decode(line, type=cls)


def draw_identity() -> tuple[str, int]:
    """An engine id and the entropy of one start."""
    return secrets.token_hex(8), secrets.randbits(63)
