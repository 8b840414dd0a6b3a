"""Bytes in, clean text out: UTF-8 decoding piece by piece."""

from __future__ import annotations

from codecs import utf_8_decode


class Utf8Stream:
    """Decodes a stream of bytes. What it returned so far, plus `flush()`, is always
    `all_bytes.decode("utf-8", errors="replace")`, wherever the stream was cut.

    It keeps at most three bytes, the beginning of a character that may yet be completed; bytes that
    cannot be UTF-8 any more become U+FFFD at once. The cost of a push depends on its own bytes only.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    @property
    def is_clean(self) -> bool:
        """No half character is held back."""
        return not self._held

    def push(self, data: bytes) -> str:
        """Text that `data` completed."""
        if self._held:
            data = self._held + data
        text, num_used = utf_8_decode(data, "replace", False)
        self._held = data[num_used:]
        return text

    def flush(self) -> str:
        """The end: a half character that was held back, as U+FFFD. The stream is then empty."""
        text, _ = utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text
