"""A tokenizer from a Hugging Face folder: `tokenizer.json`, and what stands beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from srt.errors import ConfigError
from tokenizer_proc.vocab import SpellingReader, read_byte_level, read_sentence_piece

_SIDE_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins


class _Parts(msgspec.Struct):
    """Of a tokenizer.json, what says how pieces are spelled."""

    decoder: dict[str, Any] | None = None


def read_tokenizer(path: Path) -> tuple[Tokenizer, SpellingReader]:
    """`path` is a tokenizer.json. Raises ConfigError if it cannot be read, or if its decoder is not
    one whose pieces are bytes (byte level) or SentencePiece spellings."""
    try:
        data = path.read_bytes()
        decoder = msgspec.json.decode(data, type=_Parts).decoder
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # `tokenizers` raises plain Exception
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from None
    kinds = set(_kinds(decoder))
    if "ByteLevel" in kinds:
        return tokenizer, read_byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return tokenizer, read_sentence_piece
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
