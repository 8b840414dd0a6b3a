"""Frames that came in, as messages. What is not a message stops here and stops nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from srt.errors import ProtocolError
from srt.wire.channels import PeerGone, PeerSlow
from srt.wire.codec import Decoder
from srt.wire.convert import to_failure
from srt.wire.messages import FrontReply, FrontRequest, Refused

T = TypeVar("T")


class _Named(msgspec.Struct):
    rid: str = ""


_named = msgspec.msgpack.Decoder(_Named)
logger = logging.getLogger(__name__)


def messages_in(frames: Iterable[bytes], decoder: Decoder[T]) -> list[T]:
    """The messages among `frames`. The sender is one of our processes, so a frame that is none is a
    fault of ours: it is logged and dropped, because the other requests must not pay for it."""
    messages = []
    for frame in frames:
        try:
            messages.append(decoder.decode(frame))
        except ProtocolError as error:
            logger.error("dropped a frame of %d bytes: %s", len(frame), error)
    return messages


def requests_in(
    parcels: Iterable[list[bytes]],
    decoder: Decoder[FrontRequest],
    reply: Callable[[bytes, FrontReply], None],
) -> list[tuple[bytes, FrontRequest]]:
    """The requests among what clients sent; each parcel is the peer and its frames. Whatever is not
    one request in one frame is answered with `Refused`, under the rid it names if that can be read,
    else under the empty one."""
    requests = []
    for peer, *frames in parcels:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"{len(frames)} frames came; a message is exactly one frame")
            requests.append((peer, decoder.decode(frames[0])))
        except ProtocolError as error:
            logger.warning("refused a frame of client %s: %s", peer.hex(), error)
            try:
                reply(peer, Refused(rid=_rid_of(frames), failure=to_failure(error)))
            except (PeerGone, PeerSlow):
                logger.info("client %s is not there to be told", peer.hex())
    return requests


def _rid_of(frames: list[bytes]) -> str:
    if len(frames) != 1:
        return ""
    try:
        return _named.decode(memoryview(frames[0])[1:]).rid
    except (msgspec.DecodeError, RecursionError):
        return ""
