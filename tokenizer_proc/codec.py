"""What the tokenizer process needs of a model's tokenizer. Nothing here knows how one works."""

from __future__ import annotations

from typing import Protocol

from srt.wire.params import ChatMessage, ChatOptions


class Codec(Protocol):
    """Text to tokens and back. Calls may come from two threads at once (long prompts are encoded
    off the event loop), so an implementation keeps no state between calls."""

    @property
    def vocab_size(self) -> int:
        """Ids from 0 up to this one, exclusive, may be asked for."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of `text`. `add_special_tokens` puts the model's start token in front, if the
        model has one. Special tokens written in the text are recognised."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes this one token stands for; they need not be whole characters."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether `skip_special_tokens` leaves it out."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    def render(self, messages: list[ChatMessage], options: ChatOptions) -> str:
        """The prompt text of a conversation. Raises InvalidRequest when the template refuses it."""
        ...
