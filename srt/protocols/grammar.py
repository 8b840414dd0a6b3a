"""What the scheduler sees of constrained output: a mask for the next token of a request, made again
after every token. No torch, no vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from srt.errors import TandemError
from srt.wire.params import Grammar


class Matcher(Protocol):
    """Follows one output through its grammar. All methods but `rollback` raise InvalidSchema when the
    grammar turns out to be too costly to follow."""

    @property
    def is_finished(self) -> bool:
        """Nothing can follow but an end token, or an end token has come."""
        ...

    def mask(self) -> bytes:
        """The tokens that may come next, as `Slice.allowed` has them. Never empty."""
        ...

    def accept(self, token: int) -> None:
        """`token` came. It must have been permitted."""
        ...

    def rollback(self, num: int) -> None:
        """Forgets the last `num` accepted tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The matcher of `uid` is there, `mask` is for its first token; or there is none, and why."""

    uid: int
    mask: bytes = b""
    error: TandemError | None = None


class Grammars(Protocol):
    """The matchers of all live requests that have a grammar."""

    def open(self, uid: int, grammar: Grammar) -> None:
        """Asks for a matcher and returns at once; `ready` tells when it is there."""
        ...

    def ready(self, seconds: float) -> list[Opened]:
        """Those that became ready, in the order of `open`; waits up to `seconds` for the first."""
        ...

    def follow(self, uid: int, tokens: list[int]) -> bytes | None:
        """These tokens came; the mask for the one after them, or None: the output is complete. Raises
        InvalidSchema, see `Matcher`."""
        ...

    def peek(self, uid: int, tokens: list[int]) -> bytes | None:
        """What `follow` would say, without taking the tokens; None also if it would raise, or if the
        request is over. May be called from another thread while nobody calls anything for `uid`."""
        ...

    def forget(self, uid: int) -> None:
        """The request is over, whatever became of it. Idempotent."""
        ...
