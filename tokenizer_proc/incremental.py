"""Bytes in, clean text out: UTF-8 decoding piece by piece."""

from __future__ import annotations

import codecs

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Utf8Stream:
    """Decodes a stream of bytes. What it returned so far, plus `flush()`, is always
    `all_bytes.decode("utf-8", errors="replace")`, wherever the stream was cut.

    The standard library's decoder keeps at most three bytes, the beginning of a character that may
    yet be completed; bytes that cannot be UTF-8 any more become U+FFFD at once. The cost of a push
    depends on its own bytes only.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = _new_decoder(errors="replace")

    @property
    def is_clean(self) -> bool:
        """No half character is held back."""
        return not self._decoder.getstate()[0]

    def push(self, data: bytes) -> str:
        """Text that `data` completed."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end: a half character that was held back, as U+FFFD. The stream is then empty."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
