"""A vocabulary as true bytes, and the codec that pairs it with a `tokenizers` tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from srt.errors import InvalidRequest
from srt.wire.params import ChatMessage, ChatOptions
from tokenizer_proc.chat_template import ChatTemplate

SpellingReader = Callable[[str], bytes]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[int, int]:
    """Byte-level BPE writes every byte as one printable character: printable Latin-1 bytes as
    themselves, the others as U+0100 and up, in byte order. Returns character to byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {0x100 + n: byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
_in_alphabet = re.compile(f"[{re.escape(''.join(map(chr, _BYTE_OF)))}]*").fullmatch


def read_byte_level(spelling: str) -> bytes:
    """Bytes of a piece in the byte-level alphabet. A piece with other characters is not written in
    it (it was added later) and stands for itself."""
    if _in_alphabet(spelling):
        return spelling.translate(_BYTE_OF).encode("latin-1")
    return spelling.encode()


def read_sentence_piece(spelling: str) -> bytes:
    """Bytes of a SentencePiece piece: U+2581 is a space, `<0xAB>` is one byte."""
    if found := _BYTE_PIECE.fullmatch(spelling):
        return bytes([int(found[1], 16)])
    return spelling.replace("\u2581", " ").encode()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Bytes and kind of every id: `pieces[id]`, `specials` holds the ids of special tokens."""

    pieces: list[bytes]
    specials: frozenset[int]

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def is_special(self, token: int) -> bool:
        return token in self.specials

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The one-shot decode that every stream must equal."""
        kept = (t for t in ids if not (skip_special_tokens and t in self.specials))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")


def read_vocabulary(tokenizer: Tokenizer, read_spelling: SpellingReader) -> Vocabulary:
    """See `spell_vocabulary`."""
    added = {
        token: (one.content, one.special)
        for token, one in tokenizer.get_added_tokens_decoder().items()
    }
    return spell_vocabulary(tokenizer.get_vocab(with_added_tokens=True), added, read_spelling)


def spell_vocabulary(
    spellings: Mapping[str, int],
    added: Mapping[int, tuple[str, bool]],
    read_spelling: SpellingReader,
) -> Vocabulary:
    """Ordinary tokens are read with `read_spelling`; `added` ones (text, whether it is special) are
    written as they are."""
    pieces = [b""] * (max((*spellings.values(), *added), default=-1) + 1)
    for spelling, token in spellings.items():
        pieces[token] = read_spelling(spelling)
    for token, (text, _) in added.items():
        pieces[token] = text.encode()
    return Vocabulary(pieces, frozenset(token for token, (_, special) in added.items() if special))


class TextCodec:
    """A `Codec` over any tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: Vocabulary,
        *,
        bos_token_id: int | None,
        end_token_ids: list[int],
        template: ChatTemplate | None,
    ) -> None:
        tokenizer.no_truncation()  # a prompt is never shortened behind the client's back
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._template = template
        self.bos_token_id = bos_token_id
        self.end_token_ids = end_token_ids
        self.vocab_size = len(vocabulary.pieces)
        self.has_chat_template = template is not None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch, because only that lets other threads run meanwhile; fast, because offsets into the
        # text, which nobody needs, take as long as the rest.
        found = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found[0].ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self._vocabulary.token_bytes(token)

    def is_special(self, token: int) -> bool:
        return token in self._vocabulary.specials

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._vocabulary.decode(ids, skip_special_tokens)

    def render(self, messages: list[ChatMessage], options: ChatOptions) -> str:
        return render_with(self._template, messages, options)


def render_with(
    template: ChatTemplate | None, messages: list[ChatMessage], options: ChatOptions
) -> str:
    if template is None:
        raise InvalidRequest(
            "messages: this model has no chat template; start the engine with --chat-template or "
            "send a prompt instead",
            param="messages",
        )
    return template.render(messages, options)
