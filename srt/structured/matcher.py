"""One output on its way through a grammar."""

from __future__ import annotations

from llguidance import LLMatcher

from srt.errors import InvalidSchema
from srt.wire.params import Grammar


class LazyMatcher:
    """A `Matcher` over the library's, which builds its automata as they are needed."""

    def __init__(self, inner: LLMatcher, vocab_size: int, grammar: Grammar) -> None:
        self._inner = inner
        self._num_bytes = -(-vocab_size // 8)
        self._grammar = grammar
        self._num_past = (
            0  # tokens accepted when nothing could follow; the library does not count them
        )

    @property
    def is_finished(self) -> bool:
        return bool(self._inner.is_stopped()) and not self._inner.is_error()

    def copy(self) -> LazyMatcher:
        """Another one in the same state; they share their automata and the limit
        on these."""
        other = LazyMatcher(self._inner.deep_copy(), 8 * self._num_bytes, self._grammar)
        other._num_past = self._num_past
        return other

    def mask(self) -> bytes:
        mask: bytes = self._inner.compute_bitmask()[: self._num_bytes]
        if self._inner.is_error():
            raise self._failure(self._inner.get_error())
        if not any(mask):
            raise self._failure("no text can satisfy it")
        return mask

    def accept(self, token: int) -> None:
        if self.is_finished:
            self._num_past += 1
        elif not self._inner.consume_token(token):
            raise self._failure(self._inner.get_error())

    def rollback(self, num: int) -> None:
        past = min(num, self._num_past)
        self._num_past -= past
        if num > past and not self._inner.rollback(num - past):
            raise self._failure(self._inner.get_error())

    def _failure(self, why: str) -> InvalidSchema:
        field = self._grammar.field
        reason = why.partition("\n")[0][:300]
        if reason.startswith("NoExtension"):
            reason = "no text can satisfy it"
        return InvalidSchema(f"{field}: the output cannot go on: {reason}", param=field)
