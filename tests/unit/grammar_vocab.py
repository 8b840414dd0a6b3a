"""A small vocabulary for grammars, and texts that are checked by hand."""

from __future__ import annotations

import json
import random
from typing import Any

from llguidance import LLTokenizer

from srt.structured.compile import compile_grammar
from srt.structured.matcher import LazyMatcher
from srt.structured.tokens import TokenTable, build_tokenizer
from srt.wire.params import Grammar, GrammarKind

# Every byte, some longer pieces (one of them twice), one without bytes, and two end tokens.
PIECES = [
    *(bytes([byte]) for byte in range(256)),
    b"ab", b"ba", b"ab", b"abc", b"", b'{"', b'":', b"true", "é".encode(), b"\xc3", b"  ", b"\n\t",
    b"<end>", b"<stop>",
]  # fmt: skip
ENDS = [len(PIECES) - 2, len(PIECES) - 1]
TABLE = TokenTable(pieces=PIECES, special_ids=ENDS, end_ids=ENDS)


def tokenizer() -> LLTokenizer:
    return build_tokenizer(TABLE)


def schema(value: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(value))


def start(kind: GrammarKind, text: str, made: LLTokenizer) -> LazyMatcher:
    return compile_grammar(Grammar(kind=kind, text=text), made)


def permitted(mask: bytes, num: int = len(PIECES)) -> list[int]:
    """Unpacked the slow way."""
    assert len(mask) == -(-num // 8)
    return [token for token in range(num) if mask[token // 8] & 1 << token % 8]


def write(matcher: LazyMatcher, seed: int, limit: int = 400) -> str | None:
    """A text drawn from the masks; None: not complete within `limit` tokens."""
    draw = random.Random(seed)
    text = b""
    for _ in range(limit):
        if matcher.is_finished:
            return text.decode()
        token = draw.choice(permitted(matcher.mask()))
        matcher.accept(token)
        if token in ENDS:
            assert matcher.is_finished
            return text.decode()
        text += PIECES[token]
    return None
