"""A vocabulary in the form that the grammar library wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper

from srt.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """The bytes of every id of the model; ids that stand for no text have none. Special tokens are
    never part of constrained text; `end_ids`, which are among them, may come where it may end."""

    pieces: list[bytes]
    special_ids: list[int]
    end_ids: list[int]


LoadTokens = Callable[[], TokenTable]


def build_table(
    token_bytes: Callable[[int], bytes],
    is_special: Callable[[int], bool],
    vocab_size: int,
    end_ids: list[int],
) -> TokenTable:
    """`vocab_size` is the model's; what the tokenizer does not know has no bytes."""
    ends = sorted(token for token in set(end_ids) if 0 <= token < vocab_size)
    special = {token for token in range(vocab_size) if is_special(token)} | set(ends)
    return TokenTable(
        pieces=[token_bytes(token) for token in range(vocab_size)],
        special_ids=sorted(special),
        end_ids=ends,
    )


class _Source:
    """The attributes the library reads from a tokenizer."""

    def __init__(self, table: TokenTable) -> None:
        self.tokens = table.pieces
        self.special_token_ids = table.special_ids
        self.eos_token_id = table.end_ids[0]
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """Would be asked for the tokens of text that the grammar forces; ours force none."""
        return []


def build_tokenizer(table: TokenTable) -> LLTokenizer:
    """Takes about 0.2 s for 50,000 tokens. Raises InvalidRequest for a model that cannot end."""
    if not table.end_ids:
        raise InvalidRequest(
            "response_format: this model has no end token, so it cannot end what is complete",
            param="response_format",
        )
    return LLTokenizer(TokenizerWrapper(_Source(table)), eos_token=table.end_ids)
