"""What a turn has to say, gathered so that a step's results travel as one message."""

from __future__ import annotations

from srt.wire.channels import Sender
from srt.wire.messages import Reply, TokenItem, Tokens, Turn


class Outbox:
    """Items of one uid merge into one; answers follow the items they may depend on."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._items: dict[int, TokenItem] = {}
        self._answers: list[Reply | Turn] = []

    def item(self, uid: int) -> TokenItem:
        """The item of `uid` in the next message; the caller fills it in."""
        item = self._items.get(uid)
        if item is None:
            item = self._items[uid] = TokenItem(uid=uid)
        return item

    def drop(self, uid: int) -> None:
        """Forgets what was not sent yet: nobody wants it."""
        self._items.pop(uid, None)

    def answer(self, message: Reply | Turn) -> None:
        self._answers.append(message)

    def flush(self, step: int) -> None:
        """Sends all of it. Never blocks."""
        if self._items:
            items = list(self._items.values())
            self._items = {}
            self._sender.send(Tokens(step=step, items=items))
        if self._answers:
            answers, self._answers = self._answers, []
            for message in answers:
                self._sender.send(message)
