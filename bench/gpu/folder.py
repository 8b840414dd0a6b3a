"""Model folders made of a shape: a config.json and a tokenizer of the right size, but no weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import orjson

from srt.errors import ConfigError

SHAPES = Path(__file__).parent.parent / "shapes"
END_TOKENS = ("<|begin|>", "<|end|>")


def shape_names() -> list[str]:
    return sorted(path.stem for path in SHAPES.glob("*.json"))


def read_shape(name: str) -> dict[str, Any]:
    """The config.json of a shape by its name. Raises ConfigError."""
    path = SHAPES / f"{name}.json"
    if not path.is_file():
        raise ConfigError(f"there is no shape {name}; known: {', '.join(shape_names())}")
    shape: dict[str, Any] = json.loads(path.read_text())
    return shape


def write_folder(folder: Path, shape: dict[str, Any]) -> Path:
    """What `--load-format dummy` needs of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(orjson.dumps(shape))
    specials = {shape["bos_token_id"]: END_TOKENS[0], shape["eos_token_id"]: END_TOKENS[1]}
    tokenizer = build_tokenizer(shape["vocab_size"], specials)
    (folder / "tokenizer.json").write_bytes(orjson.dumps(tokenizer))
    return folder


def build_tokenizer(size: int, specials: dict[int, str]) -> dict[str, Any]:
    """A byte-level BPE of `size` tokens, of them `specials` by id: the bytes, then words of two, three
    and more letters, each merged from the one before it and a letter, so that loading it costs what
    loading a real one costs."""
    pieces = [*_byte_spellings()]
    merges: list[list[str]] = []
    words = (
        "".join(letters)
        for length in itertools.count(2)
        for letters in itertools.product(ascii_lowercase, repeat=length)
    )
    vocabulary: dict[str, int] = {}
    for index in range(size):
        if index in specials:
            vocabulary[specials[index]] = index
        elif pieces:
            vocabulary[pieces.pop(0)] = index
        else:
            word = next(words)
            vocabulary[word] = index
            merges.append([word[:-1], word[-1]])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, text in sorted(specials.items())
        ],
        "pre_tokenizer": {**byte_level, "trim_offsets": True},
        "decoder": {**byte_level, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }


def _byte_spellings() -> list[str]:
    """How byte-level tokenizers write the 256 bytes: printable ones as they are, others from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
