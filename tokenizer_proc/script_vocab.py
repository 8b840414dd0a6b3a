"""The vocabulary of a scripted fake model: ids 0 to 255 are the single bytes, the script's own
`tokens` follow. The file is described in `srt.config.probe_script`; two keys are read here only:
`tokens`, strings or `{"bytes": [...]}`, and `chat_template` (absent: a plain one; null: none).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from srt.errors import ConfigError
from srt.wire.params import ChatMessage, ChatOptions
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.vocab import Vocabulary, render_with

SCRIPT_FILE = "tandem_script.json"
NUM_BYTES = 256
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ScriptCodec:
    """Greedy longest match over the script's tokens, then single bytes. No start token; the end
    tokens are its special ones."""

    def __init__(
        self, tokens: list[bytes], end_token_ids: list[int], template: ChatTemplate | None
    ) -> None:
        pieces = [bytes([byte]) for byte in range(NUM_BYTES)] + tokens
        self._vocabulary = Vocabulary(pieces, frozenset(end_token_ids))
        self._template = template
        self.bos_token_id: int | None = None
        self.end_token_ids = end_token_ids
        self.vocab_size = len(pieces)
        self.has_chat_template = template is not None
        # First byte to (piece, id), longest first; of equal pieces the first id.
        self._starts: dict[int, list[tuple[bytes, int]]] = {}
        for token, piece in enumerate(tokens, NUM_BYTES):
            if piece:
                self._starts.setdefault(piece[0], []).append((piece, token))
        for found in self._starts.values():
            found.sort(key=lambda pair: -len(pair[0]))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        data, at, ids = text.encode(), 0, []
        while at < len(data):
            for piece, token in self._starts.get(data[at], ()):
                if data.startswith(piece, at):
                    ids.append(token)
                    at += len(piece)
                    break
            else:
                ids.append(data[at])
                at += 1
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self._vocabulary.token_bytes(token)

    def is_special(self, token: int) -> bool:
        return token in self._vocabulary.specials

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._vocabulary.decode(ids, skip_special_tokens)

    def render(self, messages: list[ChatMessage], options: ChatOptions) -> str:
        return render_with(self._template, messages, options)


def load_script_codec(folder: Path, template_source: str | None) -> ScriptCodec:
    """`template_source` replaces the script's own template. Raises ConfigError naming the key."""
    path = folder / SCRIPT_FILE
    try:
        script: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a script: {error}") from None
    tokens = [_as_bytes(path, token) for token in script.get("tokens", [])]
    source = template_source or script.get("chat_template", PLAIN_TEMPLATE)
    template = ChatTemplate(source, origin=str(path)) if source else None
    return ScriptCodec(tokens, list(script.get("end_token_ids", [])), template)


def _as_bytes(path: Path, token: object) -> bytes:
    match token:
        case str():
            return token.encode()
        case {"bytes": list(values)} if all(isinstance(v, int) and 0 <= v < 256 for v in values):
            return bytes(values)
    raise ConfigError(f'{path}: tokens holds {token!r}; strings and {{"bytes": [0..255]}} are read')
