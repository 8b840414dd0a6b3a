"""What goes to the clients, one of which may not read."""

from __future__ import annotations

import logging

from srt.wire.channels import PeerGone, PeerSlow, RouterEnd
from srt.wire.messages import FrontReply

MOST_OWED = 1024  # messages; a client that is further behind is given up
logger = logging.getLogger(__name__)


class Replies:
    """Sends in order to each peer. Once a peer is slow only terminal messages are kept for it: they
    are owed, and offered again by `retry`."""

    def __init__(self, front: RouterEnd) -> None:
        self._front = front
        self._owed: dict[bytes, list[FrontReply]] = {}

    def send(self, peer: bytes, message: FrontReply) -> None:
        """Raises PeerGone, or PeerSlow when it could not be sent."""
        if peer in self._owed:
            self.retry(peer)
            if peer in self._owed:
                raise PeerSlow(peer.hex())
        self._front.send(peer, message)

    def owe(self, peer: bytes, message: FrontReply) -> None:
        """A terminal message, sent now or as soon as the peer reads; dropped if it is gone."""
        try:
            self.send(peer, message)
        except PeerSlow:
            owed = self._owed.setdefault(peer, [])
            if len(owed) < MOST_OWED:
                owed.append(message)
        except PeerGone:
            self._owed.pop(peer, None)

    def retry(self, peer: bytes | None = None) -> None:
        """Offers what is owed, to one peer or to all. Raises PeerGone only for the one it was given."""
        for debtor in list(self._owed) if peer is None else [peer]:
            owed = self._owed[debtor]
            try:
                while owed:
                    self._front.send(debtor, owed[0])
                    owed.pop(0)
                del self._owed[debtor]
            except PeerSlow:
                continue
            except PeerGone:
                del self._owed[debtor]
                logger.info("client %s left without reading its last messages", debtor.hex())
                if peer is not None:
                    raise
