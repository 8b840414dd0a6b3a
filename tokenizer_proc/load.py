"""The codec of a checkpoint, whatever it is stored in."""

from __future__ import annotations

from pathlib import Path

from srt.config.facts import ModelFacts
from srt.config.gguf_header import read_metadata
from srt.errors import ConfigError
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.gguf_vocab import build_tokenizer
from tokenizer_proc.hf_vocab import read_pieces, read_special_tokens, read_template, read_tokenizer
from tokenizer_proc.script_vocab import ScriptCodec, load_script_codec
from tokenizer_proc.text_stream import TokenBytes
from tokenizer_proc.vocab import TextCodec, read_vocabulary


def load_codec(
    model: ModelFacts, tokenizer_path: str | None = None, chat_template_path: str | None = None
) -> TextCodec | ScriptCodec:
    """`tokenizer_path`: a folder, a tokenizer.json or a GGUF file in place of the model's own;
    `chat_template_path`: a Jinja file in place of the tokenizer's own. The end tokens are the
    checkpoint's, or else the tokenizer's. Raises ConfigError naming the file at fault."""
    template = None if chat_template_path is None else _read_text(Path(chat_template_path))
    path, stored = _where(model, tokenizer_path)
    if stored == "script":
        return load_script_codec(path, template)
    if stored == "gguf":
        return _from_gguf(path, model.end_token_ids, template)
    return _from_folder(path, model.end_token_ids, template)


def load_vocabulary(model: ModelFacts, tokenizer_path: str | None = None) -> TokenBytes:
    """What the tokens stand for, of the codec that `load_codec` returns, sooner where that is possible.
    Raises ConfigError as it does."""
    path, stored = _where(model, tokenizer_path)
    return load_codec(model, tokenizer_path) if stored else read_pieces(_tokenizer_file(path))


def _where(model: ModelFacts, tokenizer_path: str | None) -> tuple[Path, str | None]:
    """And "script", "gguf", or None for a Hugging Face folder or its tokenizer.json."""
    path = Path(tokenizer_path or model.path)
    if path == Path(model.path) and model.format == "script":
        return path, "script"
    is_gguf = path.suffix == ".gguf" or (path == Path(model.path) and model.format == "gguf")
    return path, "gguf" if is_gguf else None


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist; name a folder that has one, or a GGUF file, with --tokenizer"
        )
    return file


def _from_gguf(path: Path, end_token_ids: list[int], template: str | None) -> TextCodec:
    metadata = read_metadata(path)
    built = build_tokenizer(metadata, str(path))
    vocabulary = read_vocabulary(built.tokenizer, built.read_spelling)
    ids = built.token_ids
    texts = {f"{name}_token": vocabulary.token_bytes(ids[name]).decode() for name in ids}
    source = template or metadata.get("tokenizer.chat_template")
    return TextCodec(
        built.tokenizer,
        vocabulary,
        bos_token_id=ids.get("bos"),
        end_token_ids=end_token_ids or [ids[name] for name in ("eos", "eot") if name in ids],
        template=ChatTemplate(source, texts, origin=f"the template of {path}") if source else None,
    )


def _from_folder(path: Path, end_token_ids: list[int], template: str | None) -> TextCodec:
    file = _tokenizer_file(path)
    folder = file.parent
    tokenizer, read_spelling = read_tokenizer(file)
    texts = read_special_tokens(folder)
    bos = tokenizer.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
    eos = tokenizer.token_to_id(texts["eos_token"]) if "eos_token" in texts else None
    source = template or read_template(folder)
    return TextCodec(
        tokenizer,
        read_vocabulary(tokenizer, read_spelling),
        bos_token_id=bos,
        end_token_ids=end_token_ids or ([] if eos is None else [eos]),
        template=ChatTemplate(source, texts, origin=f"the template of {folder}")
        if source
        else None,
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: {path} cannot be read: {error}") from None
