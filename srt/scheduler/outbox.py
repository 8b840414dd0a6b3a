"""What a turn has to say, gathered so that a step's results travel as one message."""

from __future__ import annotations

from srt.wire.channels import Sender
from srt.wire.messages import Reply, TokenItem, Tokens, Turn


class Outbox:
    """What is said of one uid merges: a single token stays in short form, anything more is one item.
    Answers follow the items they may depend on."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._items: dict[int, TokenItem] = {}
        self._plain: dict[int, int] = {}  # by uid, of those without an item: the one token it got
        self._answers: list[Reply | Turn] = []

    def item(self, uid: int) -> TokenItem:
        """The item of `uid` in the next message; the caller fills it in."""
        item = self._items.get(uid)
        if item is None:
            item = self._items[uid] = TokenItem(uid=uid)
            token = self._plain.pop(uid, None)
            if token is not None:
                item.tokens = [token]
        return item

    def put_tokens(self, tokens: dict[int, int]) -> None:
        """One token for each of these uids, and nothing else. The dictionary is the outbox's from here
        on."""
        if not self._items and not self._plain:
            self._plain = tokens
            return
        for uid, token in tokens.items():
            if uid in self._items or uid in self._plain:
                item = self.item(uid)
                item.tokens = [*item.tokens, token]
            else:
                self._plain[uid] = token

    def drop(self, uid: int) -> None:
        """Forgets what was not sent yet: nobody wants it."""
        self._items.pop(uid, None)
        self._plain.pop(uid, None)

    def answer(self, message: Reply | Turn) -> None:
        self._answers.append(message)

    def flush(self, step: int) -> None:
        """Sends all of it. Never blocks."""
        if self._items or self._plain:
            items, plain = list(self._items.values()), self._plain
            self._items, self._plain = {}, {}
            self._sender.send(
                Tokens(step=step, items=items, uids=list(plain), plain=list(plain.values()))
            )
        if self._answers:
            answers, self._answers = self._answers, []
            for message in answers:
                self._sender.send(message)
