"""Bytes to messages and back: the version byte, then msgpack. The only place that knows both."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from srt.errors import ProtocolError
from srt.wire import messages as m

T = TypeVar("T")
VERSION_BYTE = bytes([m.VERSION])
_encoder = msgspec.msgpack.Encoder()


def encode(message: m.Message) -> bytes:
    """One frame: the version byte, then msgpack. Raises UnicodeEncodeError for half a surrogate pair,
    OverflowError for an int beyond 64 bits, TypeError for what msgpack does not know."""
    return VERSION_BYTE + _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes the messages of one direction of one hop and nothing else."""

    def __init__(self, union: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, frame: bytes) -> T:
        """Raises ProtocolError on another version, an unknown tag or field, or malformed bytes."""
        if not frame:
            raise ProtocolError("an empty frame is not a message")
        if frame[0] != m.VERSION:
            raise ProtocolError(
                f"protocol version {frame[0]} was sent; this engine speaks version {m.VERSION}"
            )
        try:
            decoded: T = self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message of this hop: {error}") from None
        return decoded


def front_requests() -> Decoder[m.FrontRequest]:
    """Client to tokenizer."""
    return Decoder(m.FrontRequest)


def front_replies() -> Decoder[m.FrontReply]:
    """Tokenizer to client."""
    return Decoder(m.FrontReply)


def work() -> Decoder[m.WorkMessage]:
    """Tokenizer to scheduler."""
    return Decoder(m.WorkMessage)


def step() -> Decoder[m.StepMessage]:
    """Scheduler to detokenizer."""
    return Decoder(m.StepMessage)


def text() -> Decoder[m.TextMessage]:
    """Detokenizer to tokenizer."""
    return Decoder(m.TextMessage)
