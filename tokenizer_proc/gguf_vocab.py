"""A tokenizer from the metadata of a GGUF file, built in memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from srt.errors import ConfigError
from tokenizer_proc.vocab import SpellingReader, read_byte_level, read_sentence_piece

logger = logging.getLogger(__name__)

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# How text is cut into words before merging: the published patterns of the model families. Between
# Qwen 2 and Llama 3 only the number of digits in a word differs.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """`pattern` None: GPT-2's own."""

    pattern: str | None = None
    single_digits: bool = False
    composes: bool = False  # Unicode NFC first
    ignores_merges: bool = False  # a word that is a token is not merged step by step
    adds_bos: bool = False  # unless the file says otherwise


_DIGITS_FIRST = _Split(single_digits=True)
_QWEN2 = _Split(pattern=_WORDS % "", composes=True)
_LLAMA3 = _Split(pattern=_WORDS % "{1,3}", ignores_merges=True, adds_bos=True)
_SPLITS = {
    "gpt-2": _Split(),
    "default": _Split(),
    "smollm": _DIGITS_FIRST,
    "starcoder": _DIGITS_FIRST,
    "refact": _DIGITS_FIRST,
    "command-r": _DIGITS_FIRST,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    tokenizer: Tokenizer
    read_spelling: SpellingReader
    token_ids: dict[str, int]  # the file's special ids: bos, eos, unknown, padding, ...


def build_tokenizer(metadata: Mapping[str, Any], origin: str) -> GgufTokenizer:
    """Kinds: gpt2 (byte-level BPE, with a known `tokenizer.ggml.pre`) and llama (SentencePiece BPE).
    Raises ConfigError naming the kind it cannot build, or the key that is missing."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(
            f"{origin} holds no tokenizer (tokenizer.ggml.tokens); name one with --tokenizer"
        )
    if kind == "gpt2":
        split = _split(metadata, origin)
        adds_bos = split.adds_bos
        tokenizer, read = _byte_level(metadata, tokens, split), read_byte_level
    elif kind == "llama":
        adds_bos = True
        tokenizer, read = _sentence_piece(metadata, tokens, origin), read_sentence_piece
    else:
        raise ConfigError(
            f"{origin} has a tokenizer of kind {kind!r}; gpt2 and llama are read from GGUF. Name a "
            "folder with a tokenizer.json with --tokenizer"
        )
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    ids = {
        key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if isinstance(value, int) and 0 <= value < len(tokens)
    }
    _add_ends(tokenizer, metadata, tokens, ids, adds_bos)
    return GgufTokenizer(tokenizer, read, ids)


def _split(metadata: Mapping[str, Any], origin: str) -> _Split:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise ConfigError(
            f"{origin} cuts words in the way {name!r} (tokenizer.ggml.pre); known: "
            f"{', '.join(_SPLITS)}. Name a folder with a tokenizer.json with --tokenizer"
        )
    if name == "default":
        logger.warning("%s does not say how it cuts words; they are cut as gpt-2 does", origin)
    return _SPLITS[name]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], split: _Split) -> Tokenizer:
    merges = [tuple(pair.split(" ", 1)) for pair in metadata.get("tokenizer.ggml.merges", [])]
    model = BPE(
        vocab=_ids_of(tokens), merges=merges, ignore_merges=split.ignores_merges, fuse_unk=False
    )
    tokenizer = Tokenizer(model)
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], origin: str) -> Tokenizer:
    """SentencePiece merges the neighbours whose union has the best score. The same as a list of
    merges: every way to cut a piece into two pieces, best union first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ConfigError(f"{origin} lacks tokenizer.ggml.scores, one for each token")
    ids = _ids_of(tokens)
    ranked = []
    for token, piece in enumerate(tokens):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token], ids[left], ids[right], (left, right)))
    ranked.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        BPE(
            vocab=ids,
            merges=[pair for *_, pair in ranked],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _ids_of(tokens: list[str]) -> dict[str, int]:
    """Of equal spellings (padding, in some files) the first keeps the name."""
    ids: dict[str, int] = {}
    for token, spelling in enumerate(tokens):
        ids.setdefault(spelling, token)
    return ids


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control and user-defined tokens are recognised whole, wherever they stand in a text."""
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(tokens[token], special=is_special, normalized=False)
            for token, found in enumerate(kinds)
            if found == kind and tokens[token]
        ]
        if is_special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _add_ends(
    tokenizer: Tokenizer,
    metadata: Mapping[str, Any],
    tokens: list[str],
    ids: Mapping[str, int],
    adds_bos: bool,
) -> None:
    first = ["bos"] if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else []
    last = ["eos"] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    used = [(name, ids[name]) for name in (*first, *last) if name in ids]
    if used:
        names = {name for name, _ in used}
        single = [n for n in first if n in names] + ["$A:0"] + [n for n in last if n in names]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=used)
