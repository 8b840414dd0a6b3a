"""A tokenizer from a Hugging Face folder: `tokenizer.json`, and what stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from srt.errors import ConfigError
from tokenizer_proc.vocab import (
    SpellingReader,
    Vocabulary,
    read_byte_level,
    read_sentence_piece,
    read_vocabulary,
    spell_vocabulary,
)

_SIDE_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins


class _Model(msgspec.Struct):
    """Spellings by id, or in the order of ids with a score each."""

    vocab: dict[str, int] | list[tuple[str, float]]


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Decoder(msgspec.Struct):
    """Of a tokenizer.json, what says how pieces are spelled."""

    decoder: dict[str, Any] | None = None


class _Pieces(_Decoder, kw_only=True):
    """And the pieces."""

    model: _Model
    added_tokens: list[_Added] = []


def read_tokenizer(path: Path) -> tuple[Tokenizer, SpellingReader]:
    """`path` is a tokenizer.json. Raises ConfigError if it cannot be read, or if its decoder is not
    one whose pieces are bytes (byte level) or SentencePiece spellings."""
    try:
        data = path.read_bytes()
        decoder = msgspec.json.decode(data, type=_Decoder).decoder
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # `tokenizers` raises plain Exception
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from None
    return tokenizer, _reader_of(decoder, path)


def read_pieces(path: Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json, for those who encode nothing: a tenth of a second for 150,000
    tokens, where the whole tokenizer takes four. Raises ConfigError as `read_tokenizer` does."""
    try:
        parts = msgspec.json.decode(path.read_bytes(), type=_Pieces)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from None
    spellings = parts.model.vocab
    if isinstance(spellings, list):
        spellings = {spelling: token for token, (spelling, _) in enumerate(spellings)}
    if not _keep_their_ids(parts.added_tokens, spellings):
        return read_vocabulary(*read_tokenizer(path))
    added = {one.id: (one.content, one.special) for one in parts.added_tokens}
    return spell_vocabulary(spellings, added, _reader_of(parts.decoder, path))


def _keep_their_ids(added: list[_Added], spellings: dict[str, int]) -> bool:
    """Whether `tokenizers` leaves them as they stand in the file: there an added token that the model
    knows has the model's id, and others are numbered on from its size."""
    following = len(spellings)
    for one in added:
        if one.id != spellings.get(one.content, following):
            return False
        following += one.id == following
    return True


def _reader_of(decoder: dict[str, Any] | None, path: Path) -> SpellingReader:
    kinds = set(_kinds(decoder))
    if "ByteLevel" in kinds:
        return read_byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return read_sentence_piece
    raise ConfigError(
        f"{path} decodes with {', '.join(sorted(kinds)) or 'nothing'}; ByteLevel, ByteFallback and "
        "Metaspace are read, because only their tokens have true bytes"
    )


def _kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    if decoder is not None:
        yield decoder.get("type", "")
        for part in decoder.get("decoders", []):
            yield from _kinds(part)


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Names to texts, such as bos_token to "<s>"."""
    found: dict[str, str] = {}
    for name in _SIDE_FILES:
        for key, value in _read_object(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def read_template(folder: Path) -> str | None:
    """`chat_template.jinja` if it is there, else what tokenizer_config.json has: one template, or
    several with names, of which "default" is taken."""
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = _read_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from None
