"""The live requests of the tokenizer process. Pure: no sockets, no clock.

A request is live from its first check to the last terminal item of its samples. Ends are counted here
and nowhere else, so that each sample has exactly one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from srt.errors import DuplicateRequest
from srt.wire.messages import Output, TextItem, Texts
from srt.wire.params import Finish, Usage


@dataclass(slots=True, eq=False)
class LiveRequest:
    """`open` maps the uids that still run to their sample's index. It is empty while the prompt is
    tokenized, and the request is over when it is empty after that."""

    peer: bytes
    rid: str
    n: int
    open: dict[int, int] = field(default_factory=dict)
    is_sent: bool = False  # the scheduler knows it
    is_over: bool = False
    is_accepted: bool = False
    prompt_tokens: int = 0
    prompt_text: str | None = None  # with echo
    prompt_token_ids: list[int] | None = None  # with echo

    def output(self, index: int, item: TextItem) -> Output:
        """The item as the client sees it."""
        output = Output(
            rid=self.rid,
            index=index,
            text=item.text,
            token_ids=item.tokens,
            logprobs=item.logprobs,
            prompt_logprobs=item.prompt_logprobs,
            finish=None if item.finish is None else _count_once(item.finish, index),
        )
        if item.opened and not self.is_accepted:
            self.is_accepted = output.accepted = True
            output.prompt_tokens = self.prompt_tokens
            output.prompt_text = self.prompt_text
            output.prompt_token_ids = self.prompt_token_ids
        return output

    def ends(self, finish: Finish) -> list[Output]:
        """A terminal item for every sample that is still open."""
        indices = self.open.values() if self.is_sent else range(self.n)
        return [Output(rid=self.rid, index=index, finish=finish) for index in indices]


def _count_once(finish: Finish, index: int) -> Finish:
    """The prompt counts once per request: on sample 0."""
    if index == 0:
        return finish
    usage = Usage(completion_tokens=finish.usage.completion_tokens)
    return msgspec.structs.replace(finish, usage=usage)


class RequestTable:
    """By (peer, rid) and by uid."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[bytes, str], LiveRequest] = {}
        self._by_uid: dict[int, LiveRequest] = {}
        self._uids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(list(self._by_name.values()))

    def peers(self) -> set[bytes]:
        return {peer for peer, _ in self._by_name}

    def of_peer(self, peer: bytes) -> list[LiveRequest]:
        return [request for request in self if request.peer == peer]

    def find(self, peer: bytes, rid: str) -> LiveRequest | None:
        return self._by_name.get((peer, rid))

    def find_uid(self, uid: int) -> LiveRequest | None:
        return self._by_uid.get(uid)

    def add_plain(self, texts: Texts, outputs: dict[bytes, list[Output]]) -> int:
        """What came in short form, as each peer sees it. Returns how many of it were too late."""
        num_late = 0
        for uid, token, text in zip(texts.uids, texts.plain, texts.texts, strict=True):
            request = self._by_uid.get(uid)
            if request is None:
                num_late += 1
                continue
            output = Output(rid=request.rid, index=request.open[uid], text=text, token_ids=[token])
            outputs.setdefault(request.peer, []).append(output)
        return num_late

    def add(self, peer: bytes, rid: str, n: int) -> LiveRequest:
        """Raises DuplicateRequest."""
        if (peer, rid) in self._by_name:
            raise DuplicateRequest(
                f"this client has a live request {rid!r}; wait for its end or use another name",
                param="rid",
            )
        request = self._by_name[peer, rid] = LiveRequest(peer, rid, n)
        return request

    def send(self, request: LiveRequest) -> list[int]:
        """Opens the samples; their uids in order."""
        uids = [next(self._uids) for _ in range(request.n)]
        request.open = {uid: index for index, uid in enumerate(uids)}
        request.is_sent = True
        self._by_uid.update(dict.fromkeys(uids, request))
        return uids

    def close_sample(self, request: LiveRequest, uid: int) -> None:
        """Its terminal item is on the way."""
        del request.open[uid], self._by_uid[uid]
        if not request.open:
            self._forget(request)

    def close(self, request: LiveRequest) -> list[int]:
        """Ends the request whatever is open. Returns the uids that were."""
        uids = list(request.open)
        for uid in uids:
            del self._by_uid[uid]
        request.open.clear()
        self._forget(request)
        return uids

    def _forget(self, request: LiveRequest) -> None:
        request.is_over = True
        self._by_name.pop((request.peer, request.rid), None)
