"""Logprobs in the shapes of the OpenAI endpoints and of ours. JSON has no -inf: -9999 stands for it."""

from __future__ import annotations

import codecs
import math
from typing import Any

from srt.wire.params import LogprobEntry, TokenLogprobs

LOWEST = -9999.0


def clamp(value: float) -> float:
    return max(value, LOWEST) if not math.isnan(value) else LOWEST


def token_text(data: bytes) -> str:
    """A token's text; a token that is no whole text shows its bytes, so that two never look alike."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(entries: list[TokenLogprobs]) -> dict[str, Any]:
    content = [
        {**_chat_entry(entry.chosen), "top_logprobs": [_chat_entry(other) for other in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(entry: LogprobEntry) -> dict[str, Any]:
    return {
        "token": token_text(entry.bytes),
        "bytes": list(entry.bytes),
        "logprob": clamp(entry.logprob),
    }


def native_logprobs(entries: list[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    return [
        None
        if entry is None
        else {**_native(entry.chosen), "top": [_native(other) for other in entry.top]}
        for entry in entries
    ]


def _native(entry: LogprobEntry) -> dict[str, Any]:
    return {"id": entry.token, **_chat_entry(entry)}


class TextLogprobs:
    """The completions shape: parallel lists, with the place of each token in the choice's text.
    `top_logprobs` always holds the chosen token beside the most likely ones."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, entry: TokenLogprobs) -> None:
        chosen = entry.chosen
        text = token_text(chosen.bytes)
        value = clamp(chosen.logprob)
        top: dict[str, float] = {}
        for other in (*entry.top, chosen):  # best first: of equal texts the best one stays
            top.setdefault(token_text(other.bytes), clamp(other.logprob))
        self._append(text, value, top)
        self._num_chars += len(self._decoder.decode(chosen.bytes))

    def add_prompt(self, text: str, first: str, entries: list[TokenLogprobs | None]) -> None:
        """The prompt's tokens. The first has no logprob; its place in the text is what the others
        leave of it, which is nothing for a start token that the text does not show."""
        rest = b"".join(entry.chosen.bytes for entry in entries if entry is not None)
        self._append(first, None, None)
        self._num_chars += max(0, len(text) - len(rest.decode("utf-8", "replace")))
        for entry in entries:
            if entry is not None:
                self.add(entry)

    def _append(self, text: str, value: float | None, top: dict[str, float] | None) -> None:
        self._tokens.append(text)
        self._values.append(value)
        self._tops.append(top)
        self._offsets.append(self._num_chars)

    def take(self) -> dict[str, Any]:
        """What was added since the last take. Offsets go on."""
        body = {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._tokens, self._values, self._tops, self._offsets = [], [], [], []
        return body
